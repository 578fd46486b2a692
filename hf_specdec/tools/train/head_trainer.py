"""Trains an EAGLE-3 head: the target writes texts, the head learns to draft them."""

import copy
import os
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from hf_specdec import compat
from hf_specdec.engine.head_pairing import check_head
from hf_specdec.methods.eagle3.checkpoint import save_head
from hf_specdec.methods.eagle3.network import Eagle3Head
from hf_specdec.tools.train.card import write_head_card
from hf_specdec.tools.train.config import HeadTraining
from hf_specdec.tools.train.inputs import Prompt, check_given_head, checked_config
from hf_specdec.tools.train.loop import TrainingLoop, accelerator_for, frozen
from hf_specdec.tools.train.new_head import chosen_layers, new_head
from hf_specdec.tools.train.report import HeadReport
from hf_specdec.tools.train.rollout import HeadRollout
from hf_specdec.tools.train.texts import shards
from hf_specdec.tools.train.work import check_folder, held
from hf_specdec.tools.train.writing import drawn_where_unprompted, write_texts


def train_head(
    target: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    prompts: Sequence[Prompt] | None,
    out: str | os.PathLike[str],
    config: HeadTraining | None = None,
    *,
    head: Eagle3Head | None = None,
    show_progress: bool = True,
) -> HeadReport:
    """Train an EAGLE-3 head for `target` and save it, with a model card, to `out`.

    Args:
        target (`PreTrainedModel`): the model to draft for; it is not changed.
        tokenizer (`PreTrainedTokenizerBase`): its tokenizer.
        prompts (`Sequence`, *optional*): what the target's texts begin with: texts, or chats, each a list of messages,
            which go through the tokenizer's chat template; between two user messages in a row the target answers.
            `None` lets it write from its first token on, never greedily.
        out (`str`): folder of the head. Texts, hidden states and the state of training lie in `out`/work, which may be
            deleted afterwards.
        config (`HeadTraining`, *optional*): the settings; by default `HeadTraining()`.
        head (`Eagle3Head`, *optional*): a head of this target to begin with; the layers that it reads and the tokens
            that it drafts stay; it is not changed. `None` begins with a new one.
        show_progress (`bool`, *optional*, defaults to `True`): whether bars are shown where stderr is a terminal.

    Raises:
        ConfigError: an argument is of another type, a setting does not fit, `head` is for another target, `out` holds
            a model of another origin or work of other settings, cannot be written, or another training writes there.
        CheckpointError: a file in `out`/work is damaged.
        OSError: a file cannot be written, as on a full disk.
    """
    config = checked_config(HeadTraining, target, tokenizer, prompts, out, config)
    config = drawn_where_unprompted(config, prompts)
    check_given_head(head, Eagle3Head, "an EAGLE-3 head", config, of_shape=("layer_ids", "draft_vocab_size"))
    check_folder(out, target, head)
    accelerator, work = accelerator_for(target, config), Path(out) / "work"
    is_shown = show_progress and accelerator.is_main_process
    layer_ids = chosen_layers(target, config.layer_ids) if head is None else check_head(target, head)
    with frozen(target), held(work) if accelerator.is_main_process else nullcontext():

        def student(shards_read: Sequence[int]) -> Eagle3Head:
            """The head to be trained; the tokens of a new one are those of these shards."""
            if head is not None:
                return copy.deepcopy(head).float().train().requires_grad_(True)
            counts = _token_counts(work, shards_read, compat.text_config(target.config).vocab_size)
            return new_head(target, layer_ids, counts, config.draft_vocab_size).train()

        write_texts(
            accelerator,
            target,
            tokenizer,
            prompts,
            work,
            config,
            layer_ids=layer_ids,
            head=head,
            trial=lambda: _rolled_out(student([0]), target, config),
            is_shown=is_shown,
        )
        torch.manual_seed(config.seed)
        trained = student(range(config.num_held_out_shards, config.num_shards))
        rollout, width, output = _rolled_out(trained, target, config), trained.config.hidden_size, trained.lm_head
        loop = TrainingLoop(accelerator, trained, rollout, output=output, hidden_size=width, work=work, config=config)
        report = loop.run(is_shown)
        if accelerator.is_main_process:
            save_head(trained.to(target.dtype), out)
            write_head_card(Path(out), report, config, trained, num_prompts=None if prompts is None else len(prompts))
        accelerator.wait_for_everyone()
    return report


def _rolled_out(head: Eagle3Head, target: PreTrainedModel, config: HeadTraining) -> HeadRollout:
    embed = head.embed_tokens or target.get_input_embeddings()
    return HeadRollout(head, embed, steps=config.rollout_steps, decay=config.step_decay)


def _token_counts(work: Path, indices: Sequence[int], vocab_size: int) -> torch.Tensor:
    """Count of each token in some shards, `(vocab_size,)`."""
    counts = torch.zeros(vocab_size, dtype=torch.long)
    for shard in shards(work, indices):
        counts += torch.bincount(shard.ids[shard.real], minlength=vocab_size)
    return counts
