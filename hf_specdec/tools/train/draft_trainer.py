"""Distils a draft model: the target writes texts, a copy of its first layers learns its distributions."""

import copy
import os
import tempfile
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path

import torch
from torch import nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from hf_specdec import compat
from hf_specdec.common.files import saving_tensors
from hf_specdec.errors import ConfigError, UnsupportedModelError
from hf_specdec.loading.self_drafting import self_draft
from hf_specdec.tools.train.batch import Batch, Outcome, ahead
from hf_specdec.tools.train.card import write_draft_card
from hf_specdec.tools.train.config import DraftTraining
from hf_specdec.tools.train.inputs import Prompt, checked_config
from hf_specdec.tools.train.loop import TrainingLoop, accelerator_for
from hf_specdec.tools.train.report import HeadReport
from hf_specdec.tools.train.work import check_folder, held
from hf_specdec.tools.train.writing import drawn_where_unprompted, write_texts


def train_draft(
    target: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    prompts: Sequence[Prompt] | None,
    out: str | os.PathLike[str],
    config: DraftTraining | None = None,
    *,
    show_progress: bool = True,
) -> HeadReport:
    """Distil a draft model of `target` and save it, with its tokenizer and a model card, to `out`.

    The draft has the target's architecture and fewer layers. Load it with transformers and pass it as
    `assistant_model`.

    Args:
        target (`PreTrainedModel`): the model to draft for; it is not changed.
        tokenizer (`PreTrainedTokenizerBase`): its tokenizer.
        prompts (`Sequence`, *optional*): what the target's texts begin with: texts, or chats, each a list of messages,
            which go through the tokenizer's chat template; between two user messages in a row the target answers.
            `None` lets it write from its first token on, never greedily.
        out (`str`): folder of the draft. Texts and the state of training lie in `out`/work, which may be deleted
            afterwards.
        config (`DraftTraining`, *optional*): the settings; by default `DraftTraining()`.
        show_progress (`bool`, *optional*, defaults to `True`): whether bars are shown where stderr is a terminal.

    Raises:
        ConfigError: an argument is of another type, a setting does not fit, `out` holds work of other settings, cannot
            be written, or another training writes there.
        CheckpointError: a file in `out`/work is damaged.
        OSError: a file cannot be written, as on a full disk.
        UnsupportedModelError: the target's layers cannot be told from its other parts.
    """
    config = checked_config(DraftTraining, target, tokenizer, prompts, out, config)
    config = drawn_where_unprompted(config, prompts)
    check_folder(out, target)
    draft = _first_layers(target, config.draft_layers)
    accelerator, work = accelerator_for(target, config), Path(out) / "work"
    is_shown = show_progress and accelerator.is_main_process
    with held(work) if accelerator.is_main_process else nullcontext():
        rollout = DraftRollout(draft, steps=config.rollout_steps)
        write_texts(accelerator, target, tokenizer, prompts, work, config, trial=lambda: rollout, is_shown=is_shown)
        torch.manual_seed(config.seed)
        width, output = compat.text_config(draft.config).hidden_size, draft.get_output_embeddings()
        loop = TrainingLoop(accelerator, draft, rollout, output=output, hidden_size=width, work=work, config=config)
        report = loop.run(is_shown)
        if accelerator.is_main_process:
            with saving_tensors(out):
                draft.to(target.dtype).save_pretrained(out)
            if isinstance(tokenizer, PreTrainedTokenizerBase):
                tokenizer.save_pretrained(out)
            num_prompts = None if prompts is None else len(prompts)
            write_draft_card(Path(out), report, config, draft, target, num_prompts=num_prompts)
        accelerator.wait_for_everyone()
    return report


class DraftRollout(nn.Module):
    """A draft model over whole texts: where every token before was the text's, so are the draft's inputs.

    Args:
        draft: what is trained.
        steps (`int`): drafted tokens of the chains that are counted.
    """

    def __init__(self, draft: PreTrainedModel, *, steps: int) -> None:
        super().__init__()
        self.draft, self.steps = draft, steps
        self._takes_positions = compat.takes_position_ids(draft)

    def forward(self, batch: Batch) -> Outcome:
        """Loss and accepted chains; a chain begins at every token before one that the target wrote."""
        length = batch.ids.shape[1]
        kwargs = {"input_ids": batch.ids, "attention_mask": batch.real.long(), "use_cache": False}
        if self._takes_positions:
            kwargs["position_ids"] = (batch.real.long().cumsum(-1) - 1).clamp(min=0)
        logits = self.draft(**kwargs).logits.float()  # (N, L, vocab_size)
        counts = ahead(batch.written, 1, length) & batch.real
        right = counts & (logits.argmax(-1) == ahead(batch.ids, 1, length))
        kept, accepted = right, []
        for step in range(self.steps):
            kept = kept & ahead(right, step, length)
            accepted.append(kept.sum())
        return Outcome(_nats(logits, batch), torch.stack(accepted), counts.sum())


def _nats(logits: torch.Tensor, batch: Batch) -> torch.Tensor:
    """`()`: mean cross-entropy under the target's distributions over their likeliest tokens."""
    wanted = batch.top_probabilities.float()
    found = logits.gather(-1, batch.top_ids) - logits.logsumexp(-1, keepdim=True)
    nats = -(wanted * found).sum(-1) / wanted.sum(-1).clamp(min=1e-6)
    return (nats * batch.real).sum() / batch.real.sum().clamp(min=1)


def _first_layers(target: PreTrainedModel, layers: int | None) -> PreTrainedModel:
    """A copy of the target's first layers in fp32, with weights of its own."""
    if target.config.is_encoder_decoder:
        raise UnsupportedModelError(
            f"A draft is distilled from a decoder-only model, but {type(target).__name__} is not."
        )
    strange = [weight.dtype for weight in target.parameters() if not weight.is_floating_point() or weight.itemsize < 2]
    if strange:
        rule = "must have weights of at least 16 bits, which its draft begins with"
        raise ConfigError("target", rule, str(strange[0]), 'Load it with precision="bf16".')
    try:
        with tempfile.TemporaryDirectory() as folder:
            target.generation_config.save_pretrained(folder)  # the draft is saved with it
    except ValueError as error:
        rule, said = "must be one that transformers saves", " ".join(str(error).splitlines()[:2])
        raise ConfigError("generation_config", rule, said, "Correct that of the target.") from error
    total = int(compat.text_config(target.config).num_hidden_layers)
    try:
        first = self_draft(target, layers=layers or max(total // 4, 1))
    except ConfigError as error:
        raise ConfigError("draft_layers", error.rule, error.value, error.remedy) from error
    return copy.deepcopy(first).float().requires_grad_(True)
