"""The measurement: all rows on every prompt in turn, round after round.

A machine's speed drifts, so rows take turns on each prompt, another one beginning each time. In round 0 calls are
watched and not timed, which warms everything up. Every row has its own memory, empty when a round begins, so
that no call can draft from an answer to the same prompt.
"""

import contextlib
import copy
import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import transformers

from hf_specdec.common.transfer import left_padded
from hf_specdec.compat.models import max_positions
from hf_specdec.engine.model_state import using_method_state
from hf_specdec.errors import ConfigError, first_line
from hf_specdec.methods.common.config import check_positive, check_temperature
from hf_specdec.methods.common.entry import MethodState
from hf_specdec.tools.bench.loaded_model import LoadedModel
from hf_specdec.tools.bench.measure import measured_call
from hf_specdec.tools.bench.prompts import Prompt
from hf_specdec.tools.bench.records import Records
from hf_specdec.tools.bench.rows import Row

CACHES = ("dynamic", "static")
MAX_DRAFT = 64  # tokens that transformers' assisted generation may write after the end of a static cache's text

Progress = Callable[[str, int, int], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchSettings:
    """Settings of a measurement.

    Args:
        max_new_tokens (`int`, *optional*, defaults to `128`): most new tokens.
        do_sample (`bool`, *optional*, defaults to `False`): sample the texts.
        temperature, top_p (`float`, *optional*): of samples, else the model's.
        top_k (`int`, *optional*): of samples, else the model's.
        seed (`int`, *optional*, defaults to `0`): of samples; `seed + r` in round r.
        batch_size (`int`, *optional*, defaults to `1`): prompts decoded together.
        cache (`str`, *optional*, defaults to `"dynamic"`): dynamic or static.
    """

    max_new_tokens: int = 128
    do_sample: bool = False
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    seed: int = 0
    batch_size: int = 1
    cache: str = "dynamic"

    def __post_init__(self) -> None:
        check_positive("max_new_tokens", self.max_new_tokens, "Usual values are 64 to 512.")
        check_positive("batch_size", self.batch_size, "Usual values are 1 to 16.")
        check_temperature("temperature", self.temperature, "Leave do_sample out for greedy texts.")
        for name in ("temperature", "top_p", "top_k"):
            if getattr(self, name) is not None and not self.do_sample:
                raise ConfigError(name, "must come with do_sample", getattr(self, name), "Add it.")
        if self.cache not in CACHES:
            raise ConfigError("cache", f"must be one of {', '.join(CACHES)}", self.cache, "Leave it out for dynamic.")

    def kwargs(self, length: int) -> dict[str, Any]:
        """Arguments of `generate`, for prompts of at most `length` tokens."""
        kwargs: dict[str, Any] = {"max_new_tokens": self.max_new_tokens, "do_sample": self.do_sample}
        chosen = {"temperature": self.temperature, "top_p": self.top_p, "top_k": self.top_k}
        kwargs |= {name: value for name, value in chosen.items() if value is not None}
        if self.cache == "static":
            kwargs |= {"cache_implementation": "static", "max_cache_len": length + self.max_new_tokens + MAX_DRAFT}
        return kwargs


@dataclass(frozen=True, slots=True)
class _Batch:
    """Prompts that are decoded together, with their ids and mask, `(batch_size, length)`."""

    name: str
    task: str
    inputs: dict[str, torch.Tensor]


def measure(
    loaded: LoadedModel,
    prompts: Sequence[Prompt],
    rows: Sequence[Row],
    settings: BenchSettings,
    records: Records,
    *,
    rounds: int = 3,
    max_seconds: float = math.inf,
    progress: Progress | None = None,
    method_state: MethodState | None = None,
) -> bool:
    """Measure what `records` do not hold yet, and add it to them.

    Args:
        rounds (`int`, *optional*, defaults to `3`): timed rounds, after the one that is watched.
        max_seconds (`float`, *optional*): after which no call begins.
        progress (`Callable`, *optional*): gets a description, the number of records, and that of all.
        method_state (`MethodState`, *optional*): what every row remembers when a round begins; nothing by default.

    Returns:
        Whether all is measured; `False` where the time was up before.

    Raises:
        ConfigError: no prompt fits the model's positions.
    """
    check_positive("rounds", rounds, "Three give a spread.")
    end, before = time.monotonic() + max_seconds, MethodState() if method_state is None else method_state
    batches = list(_batches(loaded, prompts, settings))
    kwargs = settings.kwargs(max(batch.inputs["input_ids"].shape[1] for batch in batches))
    calls = [(number, row, batch) for number in range(rounds + 1) for row, batch in _turns(rows, batches, number)]
    states: dict[str, tuple[int, MethodState]] = {}  # by row: the round, and what the row remembers in it
    with records, _silent_transformers():
        for number, row, batch in calls:
            if records.has(row.name, batch.name, number):
                continue
            if time.monotonic() > end:
                return False
            if progress is not None:
                progress(f"round {number}, {batch.name}", len(records.records), len(calls))
            if number and row.name not in states:  # a run that goes on: what is compiled and read once is not timed
                with using_method_state(loaded.model, copy.deepcopy(before)):
                    _result(loaded, row, batch, kwargs, is_watched=False)
            if row.name not in states or states[row.name][0] != number:
                states[row.name] = number, copy.deepcopy(before)
            torch.manual_seed(settings.seed + number)
            with using_method_state(loaded.model, states[row.name][1]):
                result = _result(loaded, row, batch, kwargs, is_watched=number == 0)
            records.add({"row": row.name, "task": batch.task, "prompt": batch.name, "round": number, **result})
    return True


@contextlib.contextmanager
def _silent_transformers() -> Iterator[None]:
    """Errors of transformers' log alone."""
    verbosity = transformers.logging.get_verbosity()
    transformers.logging.set_verbosity_error()
    try:
        yield
    finally:
        transformers.logging.set_verbosity(verbosity)


def _turns(rows: Sequence[Row], batches: Sequence[_Batch], number: int) -> Iterator[tuple[Row, _Batch]]:
    """Each row on each batch, another one first each time."""
    for place, batch in enumerate(batches):
        first = (place + number) % len(rows)
        yield from ((row, batch) for row in [*rows[first:], *rows[:first]])


def _result(
    loaded: LoadedModel, row: Row, batch: _Batch, kwargs: dict[str, Any], *, is_watched: bool
) -> dict[str, Any]:
    """Fields of a call; transformers' own rows may refuse a model, a batch or a cache."""
    try:
        return measured_call(loaded, row, batch.inputs, kwargs, is_watched=is_watched)
    except (ValueError, TypeError, RuntimeError) as error:
        if not row.is_transformers:
            raise
        return {"error": first_line(error)}


def _batches(loaded: LoadedModel, prompts: Sequence[Prompt], settings: BenchSettings) -> Iterator[_Batch]:
    """Batches of the prompts that the model has positions for; prompts that fill none are left out."""
    positions = max_positions(loaded.model.config) or math.inf
    size, room = settings.batch_size, positions - settings.max_new_tokens
    encoded = [(prompt, prompt.encode(loaded.tokenizer)) for prompt in prompts]
    fitting = [(prompt, ids) for prompt, ids in encoded if len(ids) <= room]
    if len(fitting) < size:
        rule = f"must hold {size} prompts that leave room for {settings.max_new_tokens} of {positions} positions"
        raise ConfigError("prompts", rule, [prompt.id for prompt in prompts], "Name more or shorter prompts.")
    for start in range(0, len(fitting) - size + 1, size):
        batch = fitting[start : start + size]
        ids, mask = left_padded([ids for _, ids in batch], loaded.device)
        first, last = batch[0][0], batch[-1][0]
        name, task = (first.id, first.task) if size == 1 else (f"{first.id} to {last.id}", f"batches of {size}")
        yield _Batch(name, task, {"input_ids": ids, "attention_mask": mask})
