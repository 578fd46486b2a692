"""One row of the GPU benchmark: how fast one way of generating writes several texts, once nothing compiles any more."""

import contextlib
import hashlib
import signal
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch.profiler import ProfilerActivity, profile

from hf_specdec.tools.bench.conversation import encode
from hf_specdec.tools.bench.loaded_model import LoadedModel
from hf_specdec.tools.bench.measure import synchronize
from hf_specdec.tools.bench.memory import PeakMemory
from hf_specdec.tools.bench.prompts import default_prompts

MOST_KERNELS, MOST_LETTERS = 20, 120  # that a profile names, those that take longest; and of a name
MOST_FIRST_CALLS = 4  # of a row: a method that explores sizes has not had all widths after its first one


def same_length_texts(loaded: LoadedModel, batch: int, context: int, count: int) -> list[dict[str, torch.Tensor]]:
    """Inputs of `(batch, context)` ids: the default prompts' tokens in a circle, each row from another place."""
    text = [token for prompt in default_prompts() for token in encode(loaded, prompt)["input_ids"][0].tolist()]
    step = max(len(text) // (batch * count), 1)
    found = []
    for first in range(count):
        places = [(first + row * count) * step for row in range(batch)]
        ids = [[text[(place + token) % len(text)] for token in range(context)] for place in places]
        tensor = torch.tensor(ids, device=loaded.model.device)
        found.append({"input_ids": tensor, "attention_mask": torch.ones_like(tensor)})
    return found


class TimeUp(BaseException):
    """A row took longer than it may. What catches the errors of a compiler does not catch this."""


@contextlib.contextmanager
def at_most(seconds: float | None) -> Iterator[None]:
    """A block that ends with `TimeUp` after so many seconds; in the main thread."""
    if seconds is None:
        yield
        return

    def end(*_: object) -> None:
        raise TimeUp

    before = signal.signal(signal.SIGALRM, end)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        signal.signal(signal.SIGALRM, before)


def measure_row(
    loaded: LoadedModel,
    texts: Sequence[Mapping[str, torch.Tensor]],
    max_new_tokens: int,
    arguments: Mapping[str, Any],
) -> dict[str, Any]:
    """Seconds of a call for each text but the first, which is written until nothing compiles; digests of tokens.

    Calls in which a graph is compiled or recorded after all do not count, unless all do.
    """
    options, memory = _options(max_new_tokens, arguments), PeakMemory(loaded.model.device)
    memory.start()
    first = [_timed(loaded.model, {**texts[0], **options})]
    while first[-1].compile_seconds and len(first) < MOST_FIRST_CALLS:
        first.append(_timed(loaded.model, {**texts[0], **options}))
    calls = [first[0], *[_timed(loaded.model, {**inputs, **options}) for inputs in texts[1:]]]
    others = [call for call in calls[1:] if not call.compile_seconds] or calls[1:]
    prompts = [_timed(loaded.model, {**inputs, **options, "max_new_tokens": 1}).seconds for inputs in texts[1:]]
    num_tokens, seconds = sum(len(row) for call in others for row in call.tokens), sum(call.seconds for call in others)
    later_seconds = seconds / len(others) - sum(prompts) / len(prompts)
    known = [call.stats for call in others if call.stats is not None]
    num_drafts = sum(stats.num_drafts for stats in known)
    num_accepted = sum(stats.num_accepted_tokens for stats in known)
    peak = memory.stop()
    return {
        "tokens_per_second": num_tokens / seconds,
        "later_token_ms": 1000 * max(later_seconds, 0.0) / max(max_new_tokens - 1, 1),
        "first_call_seconds": calls[0].seconds,
        "mean_acceptance_length": 1.0 + num_accepted / num_drafts if num_drafts else None,
        "num_graphs": known[-1].num_graphs if known else None,
        "compile_seconds": None if calls[0].stats is None else sum(call.compile_seconds for call in first),
        "later_compile_seconds": sum(call.compile_seconds for call in calls[1:]),
        "plain_reason": known[-1].plain_reason if known else None,
        "peak_gigabytes": None if peak is None else peak / 1e9,
        "digests": [digest_of(call.tokens) for call in calls],
    }


def digest_of(tokens: Sequence[Sequence[int]]) -> str:
    """Digest of one call's tokens."""
    return hashlib.sha256(repr(tokens).encode()).hexdigest()


def profile_call(
    loaded: LoadedModel, inputs: Mapping[str, torch.Tensor], max_new_tokens: int, arguments: Mapping[str, Any]
) -> dict[str, Any]:
    """Profile one more call: a CUDA device's kernels by the time that they take; the operators of other devices.

    The profiler slows the host down, not the kernels.
    """
    kind, attribute, activities = "CPU", "self_cpu_time_total", [ProfilerActivity.CPU]
    if loaded.model.device.type == "cuda":
        kind, attribute = "CUDA", "self_device_time_total"
        activities.append(ProfilerActivity.CUDA)
    with profile(activities=activities) as profiler:
        call = _timed(loaded.model, {**inputs, **_options(max_new_tokens, arguments)})
    events = [event for event in profiler.key_averages() if event.device_type.name == kind]
    kernels = [
        {"name": event.key[:MOST_LETTERS], "count": event.count, "seconds": getattr(event, attribute) / 1e6}
        for event in events
    ]
    return {
        "seconds": call.seconds,
        "device_seconds": sum(kernel["seconds"] for kernel in kernels),
        "kernels": sorted(kernels, key=lambda kernel: -kernel["seconds"])[:MOST_KERNELS],
    }


def _options(max_new_tokens: int, arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments of `generate` for one row."""
    options = {"max_new_tokens": max_new_tokens, "do_sample": False, "eos_token_id": None}
    return options | {"pad_token_id": 0, "return_dict_in_generate": True, **arguments}


class _Call(NamedTuple):
    """Tokens, statistics and time of a call, without its cache."""

    tokens: list[list[int]]
    stats: Any
    seconds: float

    @property
    def compile_seconds(self) -> float:
        """Seconds in which graphs were compiled and recorded, where that is known."""
        return 0.0 if self.stats is None else float(self.stats.compile_seconds)


def _timed(model: Any, options: Mapping[str, Any]) -> _Call:
    """A call's new tokens, `spec_stats` and seconds; calls that sample draw alike."""
    torch.manual_seed(0)
    start = time.perf_counter()
    output = model.generate(**options)
    synchronize(model.device)
    seconds = time.perf_counter() - start
    new = output.sequences[:, options["input_ids"].shape[1] :].tolist()
    return _Call(new, getattr(output, "spec_stats", None), seconds)
