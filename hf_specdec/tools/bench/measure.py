"""One call of `generate`, timed or watched. Knows nothing about rounds, ratios or output.

A timed call runs as a user's call runs. A watched call has a streamer, which tells when the first token came and how
many tokens each step of transformers' own loops gave; this package's rows count their steps themselves.
"""

import hashlib
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers.generation import BaseStreamer

from hf_specdec.call.generate import class_generate
from hf_specdec.common.stats import SpecStats
from hf_specdec.tools.bench.loaded_model import LoadedModel
from hf_specdec.tools.bench.rows import Row

Record = dict[str, Any]


def measured_call(
    loaded: LoadedModel, row: Row, inputs: Mapping[str, torch.Tensor], kwargs: Mapping[str, Any], *, is_watched: bool
) -> Record:
    """Call `generate` once.

    Args:
        inputs: ids and mask of `(batch_size, length)`.
        kwargs: further arguments, the same for each row.

    Returns:
        `Record`: `num_tokens`, `seconds` and `cpu_seconds` (of the clock, and of the processor for all threads of the
            process), `digest` of the tokens; of a watched call `first_token_seconds`, `num_steps` after the prompt's
            forward and `num_step_tokens`, the tokens that these gave; `plain_reason` where nothing was drafted.
    """
    model: Any = loaded.model
    generate = class_generate(model) if row.is_transformers else model.generate
    batch_size, length = inputs["input_ids"].shape
    watch = _Watch() if is_watched and batch_size == 1 else None
    if watch is not None:
        kwargs = {**kwargs, "streamer": watch}
    copies = {name: tensor.clone() for name, tensor in inputs.items()}  # a row that writes into them harms only itself
    synchronize(loaded.device)
    cpu_started, started = time.process_time(), time.perf_counter()
    output = generate(**copies, **kwargs, **row.kwargs, return_dict_in_generate=True)
    rows = [tokens[length:] for tokens in output.sequences.tolist()]
    seconds, cpu_seconds = time.perf_counter() - started, time.process_time() - cpu_started
    rows = [_without_padding(tokens, model.generation_config) for tokens in rows] if batch_size > 1 else rows
    record: Record = {"num_tokens": sum(map(len, rows)), "seconds": seconds, "cpu_seconds": cpu_seconds}
    record["digest"] = digest_of(rows)
    stats: SpecStats | None = getattr(output, "spec_stats", None)
    if stats is not None and stats.plain_reason:
        record["plain_reason"] = stats.plain_reason
    if watch is not None:
        record["first_token_seconds"] = watch.first_token_at - started
    return record | (_steps(stats, watch) if is_watched else {})


def digest_of(rows: Sequence[Sequence[int]]) -> str:
    """A short digest of the tokens of each row of a batch."""
    return hashlib.sha256(repr([list(tokens) for tokens in rows]).encode()).hexdigest()[:16]


def synchronize(device: torch.device) -> None:
    """Let an accelerator finish what it was asked before."""
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


def _steps(stats: SpecStats | None, watch: "_Watch | None") -> Record:
    """Steps after the prompt's forward, and their tokens; none of a batch of transformers'."""
    if stats is not None and not stats.plain_reason:
        return {"num_steps": stats.num_drafts, "num_step_tokens": stats.num_drafts + stats.num_accepted_tokens}
    if watch is None:
        return {}
    return {"num_steps": len(watch.counts) - 1, "num_step_tokens": sum(watch.counts[1:])}


def _without_padding(tokens: list[int], config: Any) -> list[int]:
    ends = config.eos_token_id if isinstance(config.eos_token_id, list) else [config.eos_token_id]
    padding = ends[0] if config.pad_token_id is None else config.pad_token_id
    end = next((place for place in range(len(tokens), 0, -1) if tokens[place - 1] != padding), 0)
    return tokens[:end]


@dataclass(slots=True)
class _Watch(BaseStreamer):
    """Counts the tokens of each step."""

    first_token_at: float = 0.0
    counts: list[int] = field(default_factory=list)
    has_prompt: bool = False

    def put(self, value: torch.Tensor) -> None:
        """The prompt, then new tokens."""
        if self.has_prompt:
            self.first_token_at = self.first_token_at or time.perf_counter()
            self.counts.append(value.numel())
        self.has_prompt = True

    def end(self) -> None:
        """The text has ended."""
