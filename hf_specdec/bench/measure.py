"""One call of `generate`: timed, or looked into. Knows nothing about rounds, ratios or output.

A timed call runs as a user's call runs, nothing hooked in. A probed call has a streamer and a hook on the target, from
which every row's drafts, acceptance and time to first token come in the same way, whatever loop it runs in.
"""

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from hf_specdec.bench.memory import PeakMemory
from hf_specdec.bench.rows import Row
from hf_specdec.bench.subject import Subject
from hf_specdec.stats import SpecStats

__all__ = ["Outcome", "Probe", "probed_call", "timed_call"]

Inputs = Mapping[str, torch.Tensor]


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a timed call gave.

    Attributes:
        token_ids (`list[int]`): the new tokens, counted here for every row alike.
        seconds (`float`): wall-clock time of the call.
        cpu_seconds (`float`): processor time of the process, all its threads together.
        draft_seconds (`float | None`): time spent drafting, where the row keeps count of it.
        plain_reason (`str | None`): why nothing was drafted, where the row's loop says so.
        reliability (`list[list[float]] | None`): where the row predicts what will be accepted: mean
            prediction, share accepted and number of drafted tokens, bin by bin.
    """

    token_ids: list[int]
    seconds: float
    cpu_seconds: float
    draft_seconds: float | None
    plain_reason: str | None
    reliability: list[list[float]] | None = None


@dataclass(frozen=True, slots=True)
class Probe:
    """What a probed call gave.

    Attributes:
        first_token_seconds (`float`): from the call to the first new token at the streamer.
        blocks (`list[int]`): tokens that each of the target's forwards led to, the prompt's forward first.
        drafted (`list[int]`): drafted tokens that each forward verified.
        num_draft_tokens (`int`): tokens drafted by the row's own count, where it keeps one; lookahead's window is none.
        peak_memory_bytes (`int | None`): most memory in use during the call; `None` where it cannot be told.
    """

    token_ids: list[int]
    first_token_seconds: float
    blocks: list[int]
    drafted: list[int]
    num_draft_tokens: int
    peak_memory_bytes: int | None


def timed_call(subject: Subject, row: Row, inputs: Inputs, options: Mapping[str, Any], seed: int) -> Outcome:
    """Call `generate` once, from `seed`, and time it."""
    torch.manual_seed(seed)
    _synchronize(subject)
    cpu_started, started = time.process_time(), time.perf_counter()
    output = _generate(subject, row, None, inputs, options)
    token_ids = output.sequences[0, inputs["input_ids"].shape[1] :].tolist()
    seconds, cpu_seconds = time.perf_counter() - started, time.process_time() - cpu_started
    stats: SpecStats | None = getattr(output, "spec_stats", None)
    return Outcome(
        token_ids=token_ids,
        seconds=seconds,
        cpu_seconds=cpu_seconds,
        draft_seconds=stats.draft_seconds if stats is not None and stats.draft_seconds > 0 else None,
        plain_reason=None if stats is None else stats.plain_reason,
        reliability=[list(point) for point in getattr(stats, "reliability", None) or ()] or None,
    )


def probed_call(subject: Subject, row: Row, inputs: Inputs, options: Mapping[str, Any], seed: int) -> Probe:
    """Call `generate` once, from `seed`, and watch the target and the tokens as they come."""
    torch.manual_seed(seed)
    watch = _Watch(prompt_length=inputs["input_ids"].shape[1])
    handle = subject.model.register_forward_pre_hook(watch.forward, with_kwargs=True)
    memory = PeakMemory(subject.model.device)
    try:
        _synchronize(subject)
        memory.start()
        watch.started = time.perf_counter()
        output = _generate(subject, row, watch, inputs, options)
        peak = memory.stop()
    finally:
        handle.remove()
    stats: SpecStats | None = getattr(output, "spec_stats", None)
    return Probe(
        token_ids=output.sequences[0, watch.prompt_length :].tolist(),
        first_token_seconds=watch.first_token_seconds or 0.0,
        blocks=watch.blocks,
        drafted=watch.drafted,
        num_draft_tokens=sum(watch.drafted) if stats is None else stats.num_draft_tokens,
        peak_memory_bytes=peak,
    )


def _generate(subject: Subject, row: Row, streamer: Any, inputs: Inputs, options: Mapping[str, Any]) -> Any:
    """transformers' rows run in the class's own `generate`, as on a model that was never enabled."""
    model = subject.model
    own = row.kind in ("method", "drafter")
    generate = model.generate if own else type(model).generate.__get__(model)
    copies = {name: tensor.clone() for name, tensor in inputs.items()}  # a row that writes into them harms only itself
    return generate(**copies, **options, **row.arguments(streamer), return_dict_in_generate=True)


@dataclass(slots=True)
class _Watch:
    """A streamer and a forward hook in one: which tokens came after which forward."""

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


def _synchronize(subject: Subject) -> None:
    """Let the accelerator finish what was asked of it before."""
    if subject.model.device.type != "cpu":
        torch.accelerator.synchronize(subject.model.device)
