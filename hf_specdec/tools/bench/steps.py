"""Cost of a step outside the model's forward: drafting, observing, torch operations, and reads of the device.

On a CPU times are thread time; on CUDA they are the device's, and launches are those that the profiler saw.
"""

import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.profiler import ProfilerActivity

from hf_specdec.methods.prompt_lookup.config import PromptLookupConfig
from hf_specdec.tools.bench.conversation import encode, fitting
from hf_specdec.tools.bench.document import Document, Save, fill
from hf_specdec.tools.bench.drafting import AUTO_COLUMNS, CONTEXT_COLUMNS, auto_points, prompt_lookup_points
from hf_specdec.tools.bench.header import model_facts, new_document
from hf_specdec.tools.bench.loaded_model import LoadedModel
from hf_specdec.tools.bench.operations import OperationCounter
from hf_specdec.tools.bench.prompts import Prompt

STATIC = {"cache_implementation": "static"}
LAUNCHES = ("cudaLaunchKernel", "cudaLaunchKernelExC", "cuLaunchKernel", "cuLaunchKernelEx", "cudaMemcpyAsync")
GRAPH_LAUNCH = "cudaGraphLaunch"
WARM_STEPS = 2  # in which masks are tried out and buffers are made
COLUMNS = {
    "a step of": "{name}",
    "outside the forward": "{outside:.1f}",
    "views": "{views:.1f}",
    "inside": "{inside:.0f}",
    "in drafts": "{drafts:.0f}",
    "reads": "{reads:.1f}",
    "tokens": "{tokens_per_step:.2f}",
    "time": "{step_ms:.2f} ms",
    "launches": "{launches:.0f}",
    "graphs": "{graph_launches:.1f}",
}
NOTES = [
    "Prompt lookup and auto: median times of drafting and observing, one thread, the context made up by Zipf's law.",
    "Operations, means a step: of torch outside the models' forwards, views apart, and reads of a tensor by the host.",
    "Time: of the thread on a CPU, between two events on CUDA, where launches are the profiler's.",
]


def step_rows(loaded: LoadedModel) -> dict[str, dict[str, Any]]:
    """Arguments of `generate` by the row's name."""
    auto: dict[str, Any] = {"spec_method": "auto", "spec_config": {"num_nodes": 32, "pool": "request"}}
    chain: dict[str, Any] = {"spec_method": "prompt_lookup"}
    rows: dict[str, dict[str, Any]] = {
        "plain": {"spec_method": None},
        "prompt_lookup, chain": chain,
        "prompt_lookup, tree of 32": {"spec_method": "prompt_lookup", "spec_config": {"num_branches": 4}},
        "lookahead": {"spec_method": "lookahead"},
        "auto, 32 nodes": auto,
        "prompt_lookup, chain, static cache": chain | STATIC,
        "auto, 32 nodes, static cache": auto | STATIC,
        "plain, sampled": {"spec_method": None, "do_sample": True},
        "auto, 32 nodes, sampled": auto | {"do_sample": True},
    }
    if loaded.assistant is not None:
        rows["draft_model"] = {"spec_method": "draft_model"} | loaded.assisted
    return rows


def measure_steps(
    loaded: LoadedModel,
    prompts: Sequence[Prompt],
    *,
    max_new_tokens: int = 64,
    context_lengths: Sequence[int] = (),
    save: Save | None = None,
) -> Document:
    """Measure the cost of a step besides the forward.

    Args:
        context_lengths: at which prompt lookup is timed, next to transformers'.
        save (*optional*): gets the document so far after each row.
    """
    settings = {"num_prompts": len(prompts), "max_new_tokens": max_new_tokens}
    document = new_document("steps", loaded.device, settings=settings, models=[model_facts(loaded)], notes=NOTES)
    how: dict[str, Any] = {"max_new_tokens": max_new_tokens, "context_lengths": context_lengths}
    return fill_steps(document, loaded, prompts, save=save, **how)


def fill_steps(
    document: Document,
    loaded: LoadedModel,
    prompts: Sequence[Prompt],
    *,
    max_new_tokens: int,
    num_counted: int = 2,
    context_lengths: Sequence[int] = (),
    save: Save | None = None,
) -> Document:
    """Add the tables of drafting and of operations to a document.

    Args:
        num_counted: prompts whose steps' operations are counted; drafting is timed on all.
    """
    known, _ = fitting(loaded, prompts, max_new_tokens)
    lookups = prompt_lookup_points(PromptLookupConfig(), context_lengths)
    tables = [
        *[("prompt_lookup", CONTEXT_COLUMNS, lookups)] * bool(context_lengths),
        ("auto", AUTO_COLUMNS, auto_points(loaded, prompts, max_new_tokens=max_new_tokens)),
        ("operations", COLUMNS, operation_rows(loaded, known[:num_counted], max_new_tokens=max_new_tokens)),
    ]
    return fill(document, tables, save)


def operation_rows(loaded: LoadedModel, prompts: Sequence[Prompt], *, max_new_tokens: int) -> Iterator[dict[str, Any]]:
    """Means a step for each way to generate.

    Returns:
        `Iterator[dict]`: `name`, `outside`, `views`, `inside`, `reads`, `drafts`, `tokens_per_step`, `step_ms`, and
        `launches` and `graph_launches`, which are `None` without CUDA.
    """
    inputs = [encode(loaded, prompt) for prompt in prompts]
    options = {"max_new_tokens": max_new_tokens, "do_sample": False, "disable_compile": True}
    for name, arguments in step_rows(loaded).items():
        calls = [own | options | arguments for own in inputs]
        yield {"name": name, **_row(loaded, calls)}


def _row(loaded: LoadedModel, calls: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    model: Any = loaded.model
    model.generate(**calls[0])  # probes, and what is compiled or allocated once
    intervals, num_steps, num_tokens = [], 0, 0
    for arguments in calls:
        counter = OperationCounter(model, *([] if loaded.assistant is None else [loaded.assistant]))
        with counter:
            output = model.generate(**arguments, return_dict_in_generate=True)
        intervals += counter.between_forwards()[WARM_STEPS:]
        new = output.sequences.shape[1] - arguments["input_ids"].shape[1]
        stats = getattr(output, "spec_stats", None)
        num_steps += new - 1 if stats is None or not stats.num_forwards else stats.num_forwards
        num_tokens += new - 1
    found: dict[str, Any] = {
        field: statistics.fmean(getattr(step, field) for step in intervals) if intervals else 0.0
        for field in ("outside", "views", "inside", "reads", "drafts")
    }
    seconds = sum(_seconds(model.device, lambda call=call: model.generate(**call)) for call in calls)  # type: ignore[misc]
    launches = _launches(model.device, lambda: model.generate(**calls[0]))
    return {
        **found,
        "tokens_per_step": num_tokens / max(num_steps, 1),
        "step_ms": 1e3 * seconds / max(num_steps, 1),
        "launches": None if launches is None else launches[0] * len(calls) / max(num_steps, 1),
        "graph_launches": None if launches is None else launches[1] * len(calls) / max(num_steps, 1),
    }


def _seconds(device: torch.device, call: Callable[[], Any]) -> float:
    """Thread time of a call; on CUDA the time between two events around it."""
    if device.type != "cuda":
        start = time.thread_time()
        call()
        return time.thread_time() - start
    before, after = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    before.record()
    call()
    after.record()
    torch.cuda.synchronize(device)
    return float(before.elapsed_time(after)) / 1e3


def _launches(device: torch.device, call: Callable[[], Any]) -> tuple[int, int] | None:
    """Kernels and copies launched, and CUDA graphs; `None` without CUDA."""
    if device.type != "cuda":
        return None
    with torch.profiler.profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profile:
        call()
        torch.cuda.synchronize(device)
    counts = {event.key: event.count for event in profile.key_averages()}
    return sum(counts.get(name, 0) for name in LAUNCHES), counts.get(GRAPH_LAUNCH, 0)
