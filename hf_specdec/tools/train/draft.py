"""Draft models to be distilled: a copy of the target's first layers learns its distributions."""

import copy
import os
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from hf_specdec import compat
from hf_specdec.common.files import saving_tensors
from hf_specdec.errors import ConfigError, UnsupportedModelError, counted
from hf_specdec.loading.self_drafting import self_draft
from hf_specdec.tools.train.batch import Outcome, Texts, ahead, target_nats
from hf_specdec.tools.train.card import USE_DRAFT
from hf_specdec.tools.train.config import DraftTraining
from hf_specdec.tools.train.student import Student


class DraftStudent(Student[DraftTraining, PreTrainedModel]):
    """A model of the target's architecture with fewer layers."""

    config_class = DraftTraining

    def __init__(self, target: PreTrainedModel, tokenizer: Any, config: DraftTraining, head: None) -> None:
        super().__init__(target, tokenizer, config, head)
        self._draft = _first_layers(target, config.draft_layers)

    def draft(self, work: Path, shards: Sequence[int]) -> PreTrainedModel:
        """See `Student.draft`."""
        return self._draft

    def rollout(self, draft: PreTrainedModel) -> "DraftRollout":
        """See `Student.rollout`."""
        return DraftRollout(draft, steps=self.config.rollout_steps)

    def save(self, draft: PreTrainedModel, out: str | os.PathLike[str]) -> None:
        """As transformers saves models, with the tokenizer."""
        with saving_tensors(out):
            draft.to(self.target.dtype).save_pretrained(out)
        if isinstance(self.tokenizer, PreTrainedTokenizerBase):
            self.tokenizer.save_pretrained(out)

    def card(self, draft: PreTrainedModel) -> dict[str, str]:
        """See `Student.card`."""
        layers = draft.config.get_text_config(decoder=True).num_hidden_layers
        return {
            "library": "transformers",
            "tags": "speculative-decoding",
            "title": "Draft model",
            "what": f"A {type(draft).__name__} of {counted(layers, 'layer')} and "
            f"{draft.num_parameters() / 1e6:.2f} million parameters with the target's tokenizer, distilled from it.",
            "use": USE_DRAFT,
            "how": "It began as\nthe target's first layers with its embeddings, norm and head; the labels are the "
            "target's distributions.",
        }

    def width(self, draft: PreTrainedModel) -> int:
        """See `Student.width`."""
        return int(compat.text_config(draft.config).hidden_size)

    def output(self, draft: PreTrainedModel) -> nn.Module | None:
        """See `Student.output`."""
        found: nn.Module | None = draft.get_output_embeddings()
        return found


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

    def forward(self, batch: Texts) -> Outcome:
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
        nats, _ = target_nats(logits, batch.top_ids, batch.top_probabilities)
        loss = (nats * batch.real).sum() / batch.real.sum().clamp(min=1)
        return Outcome(loss, torch.stack(accepted), counts.sum())


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
