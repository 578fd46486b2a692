"""Processes that share a job."""

import os

import torch
from accelerate import PartialState


def processes() -> PartialState:
    """The process itself among those it was started with; alone, it is the first of one."""
    uses_cpu = os.environ.get("ACCELERATE_USE_CPU", "").lower() in ("1", "true", "yes", "on")  # not read by the next
    return PartialState(cpu=uses_cpu or not torch.accelerator.is_available())


def process_device() -> torch.device | None:
    """The device of this process where several share a job; `None` for one process, which takes what there is."""
    state = processes()
    return state.device if state.num_processes > 1 else None
