"""The texts that a draft learns from, written by the target into shards before the training."""

import dataclasses
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import torch
from accelerate import Accelerator
from torch import nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from hf_specdec.common.progress import with_bar
from hf_specdec.compat.rotary import position_limit
from hf_specdec.errors import ConfigError
from hf_specdec.tools.train.chats import Chats
from hf_specdec.tools.train.config import Training
from hf_specdec.tools.train.estimate import log_estimate, seconds_of_step
from hf_specdec.tools.train.inputs import Prompt
from hf_specdec.tools.train.texts import prompt_ids, read_shard, shard_path, write_shard
from hf_specdec.tools.train.work import begin, settings_of

AnyTraining = TypeVar("AnyTraining", bound=Training)


def drawn_where_unprompted(config: AnyTraining, prompts: Sequence[Prompt] | None) -> AnyTraining:
    """Without prompts only drawn texts: greedily, the first token is followed by one text alone."""
    if prompts is not None:
        return config
    drawn = tuple(temperature for temperature in config.temperatures if temperature > 0.0)
    return dataclasses.replace(config, temperatures=drawn or (1.0,))


def write_texts(
    accelerator: Accelerator,
    target: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    prompts: Sequence[Prompt] | None,
    work: Path,
    config: Training,
    *,
    layer_ids: Sequence[int] = (),
    head: nn.Module | None = None,
    trial: Callable[[], nn.Module],
    is_shown: bool,
) -> None:
    """Let the target write all shards into `work`; those that are there already stay.

    Args:
        head: what is trained on, if anything.
        trial: gives a rollout of the student's shape, or of one that has learned nothing, once the first shard is
            there: a step of it tells how long the training takes.

    Raises:
        ConfigError: `work` holds texts of other settings, or the texts do not fit the target's positions.
    """
    wanted, positions = max(config.prompt_lengths) + config.new_tokens, position_limit(target)
    if positions is not None and wanted > positions:
        rule = f"must fit the target's {positions} positions next to prompt_tokens {max(config.prompt_lengths)}"
        raise ConfigError("new_tokens", rule, config.new_tokens, "Use fewer of either.")
    starts = _starts(target, tokenizer, prompts, positions, config)
    if accelerator.is_main_process:
        begin(work, settings_of(target, None if prompts is None else starts, layer_ids, config, head))
    accelerator.wait_for_everyone()
    mine = range(accelerator.process_index, config.num_shards, accelerator.num_processes)
    missing = sum(not shard_path(work, index).exists() for index in mine)
    for index in with_bar(mine, total=len(mine), label="writing texts", is_shown=is_shown):
        began, is_first = time.perf_counter(), not index and not shard_path(work, index).exists()
        write_shard(work, index, target, starts, layer_ids, config)
        if is_first:
            log_estimate(
                config,
                shard_seconds=time.perf_counter() - began,
                num_missing=missing - 1,
                step_seconds=_step_seconds(accelerator, trial(), work, config),
                num_processes=accelerator.num_processes,
            )
    accelerator.wait_for_everyone()


def _step_seconds(accelerator: Accelerator, rollout: nn.Module, work: Path, config: Training) -> float:
    """Time of one step of training on texts of the first shard."""
    batch = read_shard(work, 0).batch(torch.arange(config.batch_size), accelerator.device)
    with accelerator.autocast():
        return seconds_of_step(rollout.to(accelerator.device), batch)


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
