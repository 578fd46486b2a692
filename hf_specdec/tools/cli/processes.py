"""Processes that share a job, and what the first of them keeps."""

import contextlib
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import NoReturn

import torch
from accelerate import PartialState
from transformers import PreTrainedModel

import hf_specdec
from hf_specdec.compat.models import text_config
from hf_specdec.errors import ConfigError


def processes() -> PartialState:
    """The process itself among those it was started with; alone, it is the first of one."""
    uses_cpu = os.environ.get("ACCELERATE_USE_CPU", "").lower() in ("1", "true", "yes", "on")  # not read by the next
    return PartialState(cpu=uses_cpu or not torch.accelerator.is_available())


def process_device() -> torch.device | None:
    """The device of this process where several share a job; `None` for one process, which takes what there is."""
    state = processes()
    return state.device if state.num_processes > 1 else None


@contextlib.contextmanager
def remembering(model: PreTrainedModel, file: Path | None) -> Iterator[None]:
    """Give `model` the memory in the file of `--spec-memory`, and save it at the end, also after Ctrl-C or SIGTERM."""
    if file is None:
        yield
        return
    if file.exists():
        hf_specdec.enable(model, spec_memory=_memory_of(file, model))

    def leave(number: int, frame: FrameType | None) -> NoReturn:
        raise SystemExit(128 + number)

    before = signal.signal(signal.SIGTERM, leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
        if processes().is_main_process:
            hf_specdec.spec_memory(model).save(file)


def _memory_of(file: Path, model: PreTrainedModel) -> hf_specdec.SpecMemory:
    memory, vocab_size = hf_specdec.SpecMemory.load(file), text_config(model.config).vocab_size
    tokens = [*memory.pool.generations(), memory.recycled.export()["tokens"].ravel().tolist()]
    if (largest := max((max(part) for part in tokens if part), default=0)) >= vocab_size:
        rule = f"must hold tokens of this model ({vocab_size} of them), but there is one with the number {largest}"
        remedy = "Name the file of a model with this tokenizer, or one that is not there yet."
        raise ConfigError("spec_memory", rule, str(file), remedy)
    return memory
