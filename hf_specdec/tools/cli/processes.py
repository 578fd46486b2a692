"""The processes of one launch, by torchrun or `accelerate launch`. Knows nothing about models."""

import os

import torch
from accelerate import PartialState


def processes() -> PartialState:
    """The process itself among those it was started with; alone, it is the first of one.

    accelerate looks for other processes on CPUs only if it is told that CPUs are used.
    """
    asked = os.environ.get("ACCELERATE_USE_CPU", "").lower() in ("1", "true", "yes", "on")
    return PartialState(cpu=asked or not torch.accelerator.is_available())
