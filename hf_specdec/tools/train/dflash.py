"""DFlash and DSpark heads to be trained, which draft blocks of the target's texts."""

import copy
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from hf_specdec import compat
from hf_specdec.compat.decoder_layers import CONFIGS
from hf_specdec.engine.head_pairing import check_head, output_head
from hf_specdec.errors import counted
from hf_specdec.methods.dflash.checkpoint import save_head
from hf_specdec.methods.dflash.head_config import DFlashHeadConfig
from hf_specdec.methods.dflash.network import DFlashHead
from hf_specdec.tools.train.block_rollout import BlockRollout
from hf_specdec.tools.train.card import USE_HEAD, layers_and_size
from hf_specdec.tools.train.config import DFlashTraining
from hf_specdec.tools.train.head_shape import chosen_layers, layer_config
from hf_specdec.tools.train.student import Student

BLOCK_SIZE = 8
MOST_LAYERS, LAYERS_OF_TARGET = 5, 6  # of a head where none are asked for: one for so many of the target's


class DFlashStudent(Student[DFlashTraining, DFlashHead]):
    """A DFlash head, or with a `markov_rank` a DSpark head. Embeddings and output head of its own are not trained."""

    config_class, head_class, head_kind = DFlashTraining, DFlashHead, "a DFlash head that is not transformers' own"
    of_shape = ("layer_ids", "draft_layers", "block_size", "markov_rank")

    def __init__(
        self, target: PreTrainedModel, tokenizer: Any, config: DFlashTraining, head: DFlashHead | None
    ) -> None:
        super().__init__(target, tokenizer, config, head)
        torch.manual_seed(config.seed)
        if head is None:
            self._draft = _new_head(target, config, tokenizer)
        else:
            check_head(target, head)
            self._draft = copy.deepcopy(head).float().to(compat.input_device(target)).train().requires_grad_(True)
            for module in (self._draft.embed_tokens, self._draft.lm_head):
                if module is not None:
                    module.requires_grad_(False)
        self.layer_ids = self._draft.config.layer_ids
        config.check_steps(self._draft.num_drafted)

    def draft(self, work: Path, shards: Sequence[int]) -> DFlashHead:
        """See `Student.draft`."""
        return self._draft

    def rollout(self, draft: DFlashHead) -> BlockRollout:
        """See `Student.rollout`."""
        return BlockRollout(
            draft,
            draft.embed_tokens or self.target.get_input_embeddings(),
            draft.lm_head or output_head(self.target),
            steps=self.config.rollout_steps,
            blocks=self.config.blocks_per_text,
            decay=self.config.step_decay,
        )

    def save(self, draft: DFlashHead, out: str | os.PathLike[str]) -> None:
        """In the form of its authors, or in that of the head that it began with."""
        num_layers = compat.num_decoder_layers(self.target)
        save_head(draft.to(self.target.dtype), out, num_target_layers=num_layers)

    def card(self, draft: DFlashHead) -> dict[str, str]:
        """See `Student.card`."""
        shape, (layers, size) = draft.config, layers_and_size(draft, self.layer_ids)
        title = "DSpark head" if shape.markov_rank else "DFlash 2 head" if shape.selector_rank else "DFlash head"
        own = [name for name, module in (("embeddings", draft.embed_tokens), ("output head", draft.lm_head)) if module]
        ends = f"it has {' and '.join(own)} of its own, which were not trained" if own else "embeddings and output head"
        ends += "" if own else " are the target's"
        return {
            "library": "hf_specdec",
            "tags": "speculative-decoding, " + title.split()[0].lower(),
            "title": title,
            "what": f"Drafts blocks of {counted(draft.num_drafted, 'token')} from the target's hidden states {layers}. "
            f"{counted(draft.num_layers, 'layer')},\n{size} million parameters; {ends}.\n" + _origin(draft),
            "use": USE_HEAD.replace("eagle3", "dflash"),
            "how": f"{counted(self.config.blocks_per_text, 'block')}\nof every text are trained in a step, each "
            f"place's loss weighing {self.config.step_decay:g} of the one before; the labels are the\ntarget's "
            "distributions.",
        }


def _origin(head: DFlashHead) -> str:
    """Form of its files, and the head that it began with."""
    mask = " The mask has an embedding of its own in mask_embedding.pt." if head.mask_embedding is not None else ""
    if head.published is None:
        return f"The files are in the form of the method's authors.{mask}"
    name = Path(head.name_or_path).name or "another head"
    return f"It began as {name}, and its files are in the same form.{mask}"


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
