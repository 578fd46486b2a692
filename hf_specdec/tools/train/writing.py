"""The texts that a draft learns from, written by the target into shards before the training."""

import logging
import math
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from hf_specdec.common.progress import with_bar
from hf_specdec.compat.rotary import position_limit
from hf_specdec.errors import ConfigError
from hf_specdec.tools.train.chats import Chats
from hf_specdec.tools.train.config import Training
from hf_specdec.tools.train.student import Student
from hf_specdec.tools.train.texts import prompt_ids, read_shard, shard_path, write_shard
from hf_specdec.tools.train.work import begin, settings_of

logger = logging.getLogger("hf_specdec")
Prompt = str | Sequence[Mapping[str, Any]]  # a text, or the messages of a chat


def write_texts(
    accelerator: Accelerator,
    target: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    prompts: Sequence[Prompt] | None,
    work: Path,
    config: Training,
    student: Student[Any, Any],
    *,
    is_shown: bool,
) -> None:
    """Let the target write all shards into `work`; those that are there already stay.

    After the first, a step of the student on it tells how long the training takes.

    Raises:
        ConfigError: `work` holds texts of other settings, or the texts do not fit the target's positions.
    """
    wanted, positions = max(config.prompt_lengths) + config.new_tokens, position_limit(target)
    if positions is not None and wanted > positions:
        rule = f"must fit the target's {positions} positions next to prompt_tokens {max(config.prompt_lengths)}"
        raise ConfigError("new_tokens", rule, config.new_tokens, "Use fewer of either.")
    starts = _starts(target, tokenizer, prompts, positions, config)
    if accelerator.is_main_process:
        begin(work, settings_of(target, None if prompts is None else starts, config, student))
    accelerator.wait_for_everyone()
    mine = range(accelerator.process_index, config.num_shards, accelerator.num_processes)
    missing = sum(not shard_path(work, index).exists() for index in mine)
    for index in with_bar(mine, total=len(mine), label="writing texts", is_shown=is_shown):
        began, is_first = time.perf_counter(), not index and not shard_path(work, index).exists()
        write_shard(work, index, target, starts, student.layer_ids, config)
        if is_first:
            shard_seconds = time.perf_counter() - began
            step_seconds = _step_seconds(accelerator, student, work, config)
            _log_estimate(config, accelerator.num_processes, missing - 1, shard_seconds, step_seconds)
    accelerator.wait_for_everyone()


def _step_seconds(accelerator: Accelerator, student: Student[Any, Any], work: Path, config: Training) -> float:
    """Time of a forward and backward on texts of the first shard; weights and torch's random numbers stay."""
    rollout = student.rollout(student.draft(work, [0])).to(accelerator.device).train()
    batch = read_shard(work, 0).batch(torch.arange(config.batch_size), accelerator.device)
    with accelerator.autocast(), torch.random.fork_rng():
        began = time.perf_counter()
        rollout(batch).loss.backward()
        taken = time.perf_counter() - began
    rollout.zero_grad(set_to_none=True)
    return taken


def _log_estimate(
    config: Training, num_processes: int, num_missing: int, shard_seconds: float, step_seconds: float
) -> None:
    """Log how long the rest of the writing and the training take."""
    steps = max(1, int(config.steps_per_epoch / num_processes * config.epochs))
    training = min(steps * step_seconds / 60.0, math.inf if config.minutes is None else config.minutes)
    line = "writing %d more texts takes about %.1f minutes; training, at most %d steps, about %.1f"
    logger.info(line, num_missing * config.texts_per_shard, shard_seconds * num_missing / 60.0, steps, training)


def _starts(
    target: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    prompts: Sequence[Any] | None,
    positions: int | None,
    config: Training,
) -> Chats | dict[int, list[list[int]]]:
    """Prompts that the target writes after: chats, or token ids by their length."""
    if prompts and not isinstance(prompts[0], str):
        return Chats(prompts, tokenizer, config, positions)
    return {
        length: [[_first_token(target)]] if prompts is None else prompt_ids(prompts, tokenizer, length, config)
        for length in config.prompt_lengths
    }


def _first_token(target: PreTrainedModel) -> int:
    """First token of texts of the target's own."""
    token = target.generation_config.bos_token_id
    if token is None:
        raise ConfigError("prompts", "must be given for a model without bos_token_id", None, "Give a file of prompts.")
    return int(token)
