"""Trains an EAGLE-3 head: the target writes texts, the head learns to draft them.

from hf_specdec.training import HeadTraining, train_head
report = train_head(target, tokenizer, prompts, "head", HeadTraining(num_texts=2000))
"""

import os
from collections.abc import Sequence
from pathlib import Path

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from hf_specdec import compat
from hf_specdec.methods.eagle3.checkpoint import save_head
from hf_specdec.training.card import write_head_card
from hf_specdec.training.config import HeadTraining
from hf_specdec.training.loop import TrainingLoop, accelerator_for, drawn_where_unprompted, write_texts
from hf_specdec.training.new_head import chosen_layers, new_head
from hf_specdec.training.report import HeadReport
from hf_specdec.training.rollout import HeadRollout
from hf_specdec.training.texts import shards

__all__ = ["train_head"]


def train_head(
    target: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    prompts: Sequence[str] | None,
    out: str | os.PathLike[str],
    config: HeadTraining | None = None,
    *,
    show_progress: bool = True,
) -> HeadReport:
    """Train an EAGLE-3 head for `target` and save it, with a model card, to `out`.

    Args:
        target: the model to draft for; it is not changed.
        tokenizer: its tokenizer.
        prompts: what the target's texts begin with; `None` lets it write from its first token on, never greedily.
        out: folder of the head. Texts, hidden states and the state of training lie in `out`/work, which may be deleted
            afterwards.
        config: see `HeadTraining`.
        show_progress: whether bars are shown where stderr is a terminal.

    Raises:
        ConfigError: a setting does not fit, or `out` holds work of other settings.
    """
    config = drawn_where_unprompted(config or HeadTraining(), prompts)
    accelerator, work = accelerator_for(target, config), Path(out) / "work"
    is_shown = show_progress and accelerator.is_main_process
    layer_ids = chosen_layers(target, config.layer_ids)
    write_texts(accelerator, target, tokenizer, prompts, work, config, layer_ids=layer_ids, is_shown=is_shown)
    counts = _token_counts(work, config, compat.text_config(target.config).vocab_size)
    torch.manual_seed(config.seed)
    head = new_head(target, layer_ids, counts, config.draft_vocab_size)
    rollout = HeadRollout(head, target.get_input_embeddings(), steps=config.rollout_steps, decay=config.step_decay)
    loop = TrainingLoop(accelerator, head, rollout, hidden_size=head.config.hidden_size, work=work, config=config)
    report = loop.run(is_shown)
    if accelerator.is_main_process:
        save_head(head.to(target.dtype), out)
        write_head_card(Path(out), report, config, head, num_prompts=None if prompts is None else len(prompts))
    accelerator.wait_for_everyone()
    return report


def _token_counts(work: Path, config: HeadTraining, vocab_size: int) -> torch.Tensor:
    """How often the texts that are learned from hold each token."""
    counts = torch.zeros(vocab_size, dtype=torch.long)
    for shard in shards(work, range(config.num_held_out_shards, config.num_shards)):
        counts += torch.bincount(shard.ids[shard.real], minlength=vocab_size)
    return counts
