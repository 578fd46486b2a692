"""Time that the writing of texts and the training will take, told before either is under way."""

import logging
import time

import torch
from torch import nn

from hf_specdec.tools.train.batch import Batch
from hf_specdec.tools.train.config import Training

logger = logging.getLogger("hf_specdec")


def log_estimate(
    config: Training, *, shard_seconds: float, num_missing: int, step_seconds: float, num_processes: int
) -> None:
    """Log how long the rest of the writing and the training take.

    Args:
        shard_seconds (`float`): what the first shard took.
        num_missing (`int`): shards that this process has to write.
        step_seconds (`float`): one step of training.
    """
    steps = max(1, int(config.steps_per_epoch / num_processes * config.epochs))
    training = steps * step_seconds / 60.0
    if config.minutes is not None:
        training = min(training, config.minutes)
    logger.info(
        "writing %d more texts takes about %.1f minutes; training, at most %d steps, about %.1f",
        num_missing * config.texts_per_shard,
        shard_seconds * num_missing / 60.0,
        steps,
        training,
    )


def seconds_of_step(rollout: nn.Module, batch: Batch) -> float:
    """Time of one forward and backward; the weights stay, and so do torch's random numbers."""
    with torch.random.fork_rng():
        began = time.perf_counter()
        rollout.train()
        rollout(batch).loss.backward()
        taken = time.perf_counter() - began
    rollout.zero_grad(set_to_none=True)
    return taken
