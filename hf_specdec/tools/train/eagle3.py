"""EAGLE-3 heads to be trained: shape and first weights come from the target."""

import copy
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from hf_specdec import compat
from hf_specdec.compat.decoder_layers import CONFIGS
from hf_specdec.engine.head_pairing import check_head
from hf_specdec.methods.eagle3.checkpoint import save_head
from hf_specdec.methods.eagle3.head_config import Eagle3HeadConfig
from hf_specdec.methods.eagle3.network import Eagle3Head
from hf_specdec.tools.train.card import USE_HEAD, layers_and_size
from hf_specdec.tools.train.config import HeadTraining
from hf_specdec.tools.train.head_shape import chosen_layers, layer_config
from hf_specdec.tools.train.rollout import HeadRollout
from hf_specdec.tools.train.student import Student
from hf_specdec.tools.train.texts import read_shard

MOST_DRAFT_TOKENS = 32_000


class Eagle3Student(Student[HeadTraining, Eagle3Head]):
    """An EAGLE-3 head."""

    config_class, head_class, head_kind = HeadTraining, Eagle3Head, "an EAGLE-3 head"
    of_shape = ("layer_ids", "draft_vocab_size")

    def __init__(self, target: PreTrainedModel, tokenizer: Any, config: HeadTraining, head: Eagle3Head | None) -> None:
        super().__init__(target, tokenizer, config, head)
        self.layer_ids = chosen_layers(target, config.layer_ids) if head is None else check_head(target, head)

    def draft(self, work: Path, shards: Sequence[int]) -> Eagle3Head:
        """See `Student.draft`."""
        if self.head is not None:
            copied: Eagle3Head = copy.deepcopy(self.head).float().train().requires_grad_(True)
            return copied
        vocab_size = compat.text_config(self.target.config).vocab_size
        counts = torch.zeros(vocab_size, dtype=torch.long)  # of each token in the texts
        for index in shards:
            shard = read_shard(work, index)
            counts += torch.bincount(shard.ids[shard.real], minlength=vocab_size)
        return new_head(self.target, self.layer_ids, counts, self.config.draft_vocab_size).train()

    def rollout(self, draft: Eagle3Head) -> HeadRollout:
        """See `Student.rollout`."""
        embed = draft.embed_tokens or self.target.get_input_embeddings()
        return HeadRollout(draft, embed, steps=self.config.rollout_steps, decay=self.config.step_decay)

    def save(self, draft: Eagle3Head, out: str | os.PathLike[str]) -> None:
        """In the speculators format."""
        save_head(draft.to(self.target.dtype), out)

    def card(self, draft: Eagle3Head) -> dict[str, str]:
        """See `Student.card`."""
        shape, (layers, size) = draft.config, layers_and_size(draft, self.layer_ids)
        return {
            "library": "hf_specdec",
            "tags": "speculative-decoding, eagle3, speculators",
            "title": "EAGLE-3 draft head",
            "what": f"Drafts tokens from the target's hidden states {layers}. {size} million parameters, "
            f"{shape.draft_vocab_size:,} of the target's\n{shape.vocab_size:,} tokens. The files are in the "
            "speculators format.",
            "use": USE_HEAD,
            "how": f"{self.config.rollout_steps} draft steps\nof every position are trained (training-time test), each "
            f"step's loss weighing {self.config.step_decay:g} of the one before; the labels\nare the target's "
            "distributions.",
        }


def new_head(
    target: PreTrainedModel, layer_ids: tuple[int, ...], counts: torch.Tensor, draft_vocab_size: int | None
) -> Eagle3Head:
    """A head in fp32 that has learned nothing yet; its output layer begins as the target's.

    Args:
        counts: `(vocab_size,)`, how often each token stands in the texts.
        draft_vocab_size: tokens to draft, the most frequent ones; `None` is all, at most 32,000.
    """
    text_config = compat.text_config(target.config)
    layer_class = CONFIGS["qwen3" if text_config.model_type == "qwen3" else "llama"]
    layer = layer_config(text_config, layer_class, num_layers=1)
    vocab_size = len(counts)
    size = min(draft_vocab_size or MOST_DRAFT_TOKENS, vocab_size)
    config = Eagle3HeadConfig(
        layer=layer,
        draft_vocab_size=size,
        target_hidden_size=layer.hidden_size,
        layer_ids=layer_ids,
        norm_before_residual=True,
        target_name=str(target.config.name_or_path) or None,
        target_architectures=(type(target).__name__,),
    )
    head = Eagle3Head(config)
    if size < vocab_size:
        head.set_target_ids(counts.topk(size).indices.sort().values)
    weight: Any = getattr(target.get_output_embeddings(), "weight", None)
    is_dense = isinstance(weight, torch.Tensor) and weight.is_floating_point()
    if is_dense and weight.shape == (vocab_size, layer.hidden_size):
        with torch.no_grad():
            head.lm_head.weight.copy_(weight[head.target_ids.to(weight.device)])
    return head
