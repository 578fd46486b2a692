"""Trains a DFlash head: the target writes texts, the head learns to draft blocks of them."""

import copy
import os
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from hf_specdec import compat
from hf_specdec.compat.decoder_layers import CONFIGS
from hf_specdec.engine.head_pairing import check_head, output_head
from hf_specdec.methods.dflash.checkpoint import save_head
from hf_specdec.methods.dflash.head_config import DFlashHeadConfig
from hf_specdec.methods.dflash.network import DFlashHead
from hf_specdec.tools.train.block_rollout import BlockRollout
from hf_specdec.tools.train.card import write_dflash_card
from hf_specdec.tools.train.config import DFlashTraining
from hf_specdec.tools.train.inputs import Prompt, check_given_head, checked_config
from hf_specdec.tools.train.loop import TrainingLoop, accelerator_for, frozen
from hf_specdec.tools.train.new_head import chosen_layers, layer_config
from hf_specdec.tools.train.report import HeadReport
from hf_specdec.tools.train.work import check_folder, held
from hf_specdec.tools.train.writing import drawn_where_unprompted, write_texts

BLOCK_SIZE = 8
SHAPE = ("layer_ids", "draft_layers", "block_size", "markov_rank")  # settings that a given head has already
MOST_LAYERS, LAYERS_OF_TARGET = 5, 6  # of a head where none are asked for: one for so many of the target's


def train_dflash(
    target: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    prompts: Sequence[Prompt] | None,
    out: str | os.PathLike[str],
    config: DFlashTraining | None = None,
    *,
    head: DFlashHead | None = None,
    show_progress: bool = True,
) -> HeadReport:
    """Train a DFlash head for `target`, or a DSpark head, and save it, with a model card, to `out`.

    Token embeddings and an output head of its own are not trained.

    Args:
        target (`PreTrainedModel`): the model to draft for; it is not changed.
        tokenizer (`PreTrainedTokenizerBase`): its tokenizer.
        prompts (`Sequence`, *optional*): what the target's texts begin with: texts, or chats, each a list of messages,
            which go through the tokenizer's chat template; between two user messages in a row the target answers.
            `None` lets it write from its first token on, never greedily.
        out (`str`): folder of the head. Texts, hidden states and the state of training lie in `out`/work, which may be
            deleted afterwards.
        config (`DFlashTraining`, *optional*): the settings; by default `DFlashTraining()`.
        head (`DFlashHead`, *optional*): a head of this target to begin with, of any kind that `AutoDraftHead` reads
            from files but transformers' own; its shape and its form on disk stay, and it is not changed. `None` begins
            with a new one.
        show_progress (`bool`, *optional*, defaults to `True`): whether bars are shown where stderr is a terminal.

    Raises:
        ConfigError: an argument is of another type, a setting does not fit, `head` is for another target, `out` holds
            a model of another origin or work of other settings, cannot be written, or another training writes there.
        CheckpointError: a file in `out`/work is damaged.
        OSError: a file cannot be written, as on a full disk.
        UnsupportedModelError: the target is an encoder-decoder.
    """
    config = checked_config(DFlashTraining, target, tokenizer, prompts, out, config)
    config = drawn_where_unprompted(config, prompts)
    check_given_head(head, DFlashHead, "a DFlash head that is not transformers' own", config, of_shape=SHAPE)
    check_folder(out, target, head)
    accelerator, work = accelerator_for(target, config), Path(out) / "work"
    is_shown = show_progress and accelerator.is_main_process
    torch.manual_seed(config.seed)
    student = _new_head(target, config, tokenizer) if head is None else _trained_on(head, target)
    layer_ids = student.config.layer_ids
    config.check_steps(student.num_drafted)
    with frozen(target), held(work) if accelerator.is_main_process else nullcontext():
        rollout, width = _rollout(student, target, config), student.hidden_size
        write_texts(
            accelerator,
            target,
            tokenizer,
            prompts,
            work,
            config,
            layer_ids=layer_ids,
            head=head,
            trial=lambda: rollout,
            is_shown=is_shown,
        )
        loop = TrainingLoop(accelerator, student, rollout, output=None, hidden_size=width, work=work, config=config)
        report = loop.run(is_shown)
        if accelerator.is_main_process:
            save_head(student.to(target.dtype), out, num_target_layers=compat.num_decoder_layers(target))
            num_prompts = None if prompts is None else len(prompts)
            write_dflash_card(Path(out), report, config, student, target, num_prompts=num_prompts)
        accelerator.wait_for_everyone()
    return report


def _trained_on(head: DFlashHead, target: PreTrainedModel) -> DFlashHead:
    """A copy of a given head in fp32, whose embeddings and output head stay.

    Raises:
        ConfigError: it is for another target.
    """
    check_head(target, head)
    student = copy.deepcopy(head).float().to(compat.input_device(target)).train().requires_grad_(True)
    for module in (student.embed_tokens, student.lm_head):
        if module is not None:
            module.requires_grad_(False)
    return student


def _rollout(head: DFlashHead, target: PreTrainedModel, config: DFlashTraining) -> BlockRollout:
    return BlockRollout(
        head,
        head.embed_tokens or target.get_input_embeddings(),
        head.lm_head or output_head(target),
        steps=config.rollout_steps,
        blocks=config.blocks_per_text,
        decay=config.step_decay,
    )


def _new_head(target: PreTrainedModel, config: DFlashTraining, tokenizer: Any) -> DFlashHead:
    """A head in fp32 that has learned nothing yet; its mask is the mean of the target's embeddings."""
    layer_ids = chosen_layers(target, config.layer_ids)
    num_layers = config.draft_layers or min(max(compat.num_decoder_layers(target) // LAYERS_OF_TARGET, 1), MOST_LAYERS)
    layer = layer_config(compat.text_config(target.config), CONFIGS["qwen3"], num_layers=num_layers)
    embeddings: Any = compat.input_embeddings(target)
    shape = DFlashHeadConfig(
        layer=layer,
        block_size=BLOCK_SIZE if config.block_size is None else config.block_size,
        mask_token_id=_mask_token(target, tokenizer),
        layer_ids=layer_ids,
        draft_vocab_size=layer.vocab_size,
        target_hidden_size=layer.hidden_size,
        drafts_at_root=bool(config.markov_rank),
        markov_rank=config.markov_rank or 0,
    )
    head = DFlashHead(shape, has_mask_embedding=True).to(compat.input_device(target))
    with torch.no_grad():
        assert head.mask_embedding is not None
        tokens = torch.arange(layer.vocab_size, device=embeddings.weight.device)
        head.mask_embedding.copy_(embeddings(tokens).float().mean(0))
        if head.markov_head is not None:  # begins as if there were none
            head.markov_head.markov_w2.weight.zero_()
    return head.train()


def _mask_token(target: PreTrainedModel, tokenizer: Any) -> int:
    """A token that stands for one to be drafted; its embedding is not read, since the head has one of its own."""
    config, embeddings = target.generation_config, target.get_input_embeddings()
    for token in (getattr(tokenizer, "mask_token_id", None), config.pad_token_id, config.eos_token_id):
        if isinstance(token, int) and 0 <= token < len(embeddings.weight):
            return token
    return 0
