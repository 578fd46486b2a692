"""One call of `generate`: timed, or watched. Knows nothing about rounds, ratios or output.

A timed call runs as a user's call runs, nothing hooked in. A watched call has a streamer and a hook on the target, from
which every row's drafts, acceptance and time to first token come in the same way, whatever loop it runs in. A batch has
no streamer: what its rows accept is taken from the call's statistics.
"""

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from hf_specdec.call.run import class_generate
from hf_specdec.common.stats import SpecStats
from hf_specdec.tools.bench.loaded_model import LoadedModel
from hf_specdec.tools.bench.memory import PeakMemory
from hf_specdec.tools.bench.rows import Row

Inputs = Mapping[str, torch.Tensor]


@dataclass(frozen=True, slots=True)
class Outcome:
    """Outcome of one call; `None` where it is not known.

    Attributes:
        token_ids (`list[int]`): the new tokens, counted here for every row alike; of a batch row after row, padding
            left out.
        seconds (`float`): wall-clock time of the call.
        cpu_seconds (`float`): processor time of the process, all its threads together.
        draft_seconds (`float`): time spent drafting, where the row keeps count of it.
        plain_reason (`str`): why nothing was drafted, where the row's loop says so.
        first_token_seconds (`float`): of a watched call, from its start to the first new token at the streamer.
        blocks (`list[int]`): of a watched call, tokens that each of the target's forwards led to, the prompt's first.
        drafted (`list[int]`): of a watched call, drafted tokens that each forward verified.
        num_draft_tokens (`int`): of a watched call, tokens drafted by the row's own count, where it keeps one;
            lookahead's window is none.
        mean_acceptance_length (`float`): of a watched batch, by the row's own count.
        peak_memory_bytes (`int`): of a watched call, most memory in use.
        error (`str`): why there are no tokens.
    """

    token_ids: list[int]
    seconds: float
    cpu_seconds: float
    draft_seconds: float | None = None
    plain_reason: str | None = None
    first_token_seconds: float | None = None
    blocks: list[int] | None = None
    drafted: list[int] | None = None
    num_draft_tokens: int | None = None
    mean_acceptance_length: float | None = None
    peak_memory_bytes: int | None = None
    error: str | None = None

    def record(self) -> dict[str, Any]:
        """Known fields, as JSON values."""
        values = {name: getattr(self, name) for name in self.__slots__}
        return {name: value for name, value in values.items() if value is not None}


def measured_call(
    loaded: LoadedModel, row: Row, inputs: Inputs, options: Mapping[str, Any], seed: int, *, is_watched: bool = False
) -> Outcome:
    """Call `generate` once, from `seed`, on ids and mask of `(rows, length)`, and time it or watch it."""
    torch.manual_seed(seed)
    num_rows, prompt_length = inputs["input_ids"].shape
    watch = _Watch(num_rows, prompt_length) if is_watched else None
    handle = None if watch is None else loaded.model.register_forward_pre_hook(watch.forward, with_kwargs=True)
    memory = PeakMemory(loaded.device)
    try:
        synchronize(loaded.device)
        if watch is not None:
            memory.start()
            watch.started = time.perf_counter()
        cpu_started, started = time.process_time(), time.perf_counter()
        output = _generate(loaded, row, watch, inputs, options)
        sequences = output if isinstance(output, torch.Tensor) else output.sequences
        token_ids = _new_tokens(sequences[:, prompt_length:].tolist(), loaded.model)
        seconds, cpu_seconds = time.perf_counter() - started, time.process_time() - cpu_started
        peak = None if watch is None else memory.stop()
    finally:
        if handle is not None:
            handle.remove()
    stats: SpecStats | None = getattr(output, "spec_stats", None)
    seen = {} if watch is None else watch.seen(stats)
    return Outcome(token_ids, seconds, cpu_seconds, **_told(stats), **seen, peak_memory_bytes=peak)


def _generate(loaded: LoadedModel, row: Row, watch: "_Watch | None", inputs: Inputs, options: Mapping[str, Any]) -> Any:
    """transformers' rows run in the class's own `generate`, as on a model that was never enabled.

    A timed batch returns no cache, so that its rows leave it when their texts end.
    """
    model = loaded.model
    own = row.kind in ("method", "drafter")
    generate = model.generate if own else class_generate(model)
    copies = {name: tensor.clone() for name, tensor in inputs.items()}  # a row that writes into them harms only itself
    is_batch = inputs["input_ids"].shape[0] > 1
    arguments = row.arguments(None if is_batch else watch)
    return generate(**copies, **options, **arguments, return_dict_in_generate=watch is not None or not is_batch)


def _new_tokens(rows: list[list[int]], model: Any) -> list[int]:
    """Ids of a batch row after row, without the padding after each."""
    if len(rows) == 1:
        return rows[0]
    config = model.generation_config
    ends = config.eos_token_id if isinstance(config.eos_token_id, list) else [config.eos_token_id]
    padding = ends[0] if config.pad_token_id is None else config.pad_token_id
    kept: list[int] = []
    for tokens in rows:
        while tokens and tokens[-1] == padding:
            tokens.pop()
        kept += tokens
    return kept


def _told(stats: SpecStats | None) -> dict[str, Any]:
    """Fields that every call's statistics give, where it has any."""
    if stats is None:
        return {}
    return {
        "draft_seconds": stats.draft_seconds if stats.draft_seconds > 0 else None,
        "plain_reason": stats.plain_reason,
    }


@dataclass(slots=True)
class _Watch:
    """A streamer and a forward hook in one: which tokens came after which forward."""

    num_rows: int
    prompt_length: int
    started: float = 0.0
    first_token_seconds: float | None = None
    blocks: list[int] = field(default_factory=list)
    drafted: list[int] = field(default_factory=list)
    prompt_seen: bool = False

    def forward(self, module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Before a forward of the target: T tokens, of which the prompt's (or the last one) are not drafted."""
        ids = kwargs.get("input_ids", args[0] if args else None)
        known = 1 if self.blocks else self.prompt_length
        self.drafted.append(max(int(ids.shape[1]) - known, 0) if ids is not None else 0)
        self.blocks.append(0)

    def put(self, value: torch.Tensor) -> None:
        """The prompt, then new tokens, as transformers hands them to a streamer."""
        if not self.prompt_seen:
            self.prompt_seen = True
            return
        if self.first_token_seconds is None:
            self.first_token_seconds = time.perf_counter() - self.started
        if self.blocks:
            self.blocks[-1] += value.numel()

    def end(self) -> None:
        """Nothing to do."""

    def seen(self, stats: SpecStats | None) -> dict[str, Any]:
        """Fields of an `Outcome`."""
        num_drafted = sum(self.drafted) if stats is None else stats.num_draft_tokens
        found: dict[str, Any] = {"drafted": self.drafted, "num_draft_tokens": num_drafted}
        if self.num_rows > 1:
            return {**found, "mean_acceptance_length": 1.0 if stats is None else stats.mean_acceptance_length}
        return {**found, "blocks": self.blocks, "first_token_seconds": self.first_token_seconds or 0.0}


def synchronize(device: torch.device) -> None:
    """Let an accelerator finish what was asked of it before."""
    if device.type != "cpu":
        torch.accelerator.synchronize(device)
