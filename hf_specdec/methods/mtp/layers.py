"""transformers' multi-token prediction layers, as the checkpoints of each family have them."""

import copy
import functools
import re
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from hf_specdec.compat.models import text_config
from hf_specdec.compat.mtp import (
    MtpModel,
    WeightRenaming,
    get_checkpoint_conversion_mapping,
    get_model_conversion_mapping,
    shared_logits,
    widening,
)
from hf_specdec.errors import UnsupportedModelError
from hf_specdec.methods.mtp.families import FULL, NUMBERED, MtpFamily, family_of

OTHER_METHOD = 'Use another spec_method, such as "auto".'
RECURRENT = "linear_attention"


class FamilyMtp(MtpModel):
    """`MtpModel` of a family whose layers differ from what transformers knows of them.

    Attributes:
        heads (`nn.ModuleList`): an output head for each layer, where the family has them; else empty.
    """

    def __init__(self, main_model: PreTrainedModel, num_mtp_layers: int) -> None:
        super().__init__(main_model, num_mtp_layers)
        self.family = _family(main_model)
        config = self.config
        norm = type(main_model.get_decoder().norm) if hasattr(main_model.get_decoder(), "norm") else None
        for layer in self.layers:
            if norm is not None and type(layer.enorm) is not norm:
                # transformers takes the first norm inside the last layer, which may be a part of its mixer
                layer.enorm, layer.hnorm, layer.post_norm = (
                    norm(config.hidden_size, eps=config.rms_norm_eps) for _ in range(3)
                )
            if not self.family.chains_norm:
                layer.use_post_norm = False
        if not self.family.has_norm:
            for layer in self.layers:
                layer.use_post_norm, layer.post_norm = False, None
        types = block_types(config, self.family)
        if types:
            for place, layer in enumerate(self.layers):
                layer.mtp_block = _Blocks(type(layer.mtp_block), config, place, types)
        if self.family.halves:
            for place, layer in enumerate(self.layers):
                layer.mtp_block = _FirstHalf(layer.mtp_block, place)
        self.heads = nn.ModuleList()
        if self.family.has_heads:
            head = functools.partial(nn.Linear, config.hidden_size, config.vocab_size, bias=False)
            self.heads.extend(head() for _ in self.layers)

    @property
    def is_staged(self) -> bool:
        """Returns whether what follows a block, norm or head, is the layer's own and not read by the next one."""
        return not self.family.chains_norm or self.family.has_heads

    @staticmethod
    def get_mtp_weights_regex(main_model: PreTrainedModel) -> re.Pattern[str]:
        """See `MtpModel`."""
        family, text = _family(main_model), text_config(main_model.config)
        if family.keys != NUMBERED:
            return re.compile(family.keys)
        first = text.num_hidden_layers
        numbers = "|".join(str(first + place) for place in range(text.num_mtp_layers))
        return re.compile(NUMBERED.replace(r"\d+", numbers))

    def get_weight_conversions(self, main_model: PreTrainedModel) -> list[Any]:
        """See `MtpModel`; it finds its own mapping by the name of its class."""
        count, family = len(self.layers), self.family
        first = main_model.config.get_text_config().num_hidden_layers
        names = {r"^model\.language_model\.": "model.", r"^language_model\.": "", **family.names}
        for place in range(count if family.has_heads else 0):
            names[rf"^.*\blayers\.{first + place}\..*\bshared_head\.output\."] = f"heads.{place}."
        names |= _block_names(count, len(block_types(self.config, family)))
        for place in range(count):
            names[rf"layers\.{first + place}\."] = f"layers.{place}.mtp_block."
        renamings = [WeightRenaming(source_patterns=source, target_patterns=target) for source, target in names.items()]
        # those of a composite model's decoder apply below its name alone
        kinds = {
            "MtpModel": renamings,
            text_config(main_model.config).model_type: get_model_conversion_mapping(main_model),
        }
        conversions: list[Any] = []
        for kind, before in kinds.items():
            conversions += [*before, *(get_checkpoint_conversion_mapping(kind) or ())]
        return widening(conversions, self)


class _Blocks(nn.ModuleList):
    """Decoder blocks of several types, one after another, as one MTP layer."""

    def __init__(self, block: type[nn.Module], config: Any, place: int, types: Sequence[str]) -> None:
        super().__init__()
        for kind in types:
            block_config = copy.copy(config)
            block_config.layer_types = [kind] * (place + 1)
            self.append(block(block_config, place))

    def forward(self, hidden_states: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        for block in self:
            hidden_states = block(hidden_states, **kwargs)
        return hidden_states


class _FirstHalf(nn.Module):
    """The first attention and dense network of a layer that has two, and experts besides them."""

    def __init__(self, layer: Any, place: int) -> None:
        super().__init__()
        self.input_layernorm, self.self_attn = layer.input_layernorm[0], layer.self_attn[0]
        self.post_attention_layernorm, self.mlp = layer.post_attention_layernorm[0], layer.mlps[0]
        self.self_attn.layer_idx = place

    def forward(self, hidden_states: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        attended: torch.Tensor = hidden_states + self.self_attn(self.input_layernorm(hidden_states), **kwargs)[0]
        computed: torch.Tensor = attended + self.mlp(self.post_attention_layernorm(attended))
        return computed


def block_types(config: Any, family: MtpFamily) -> list[str]:
    """Types of the blocks of one layer; empty where it has the one.

    Raises:
        UnsupportedModelError: more than one of them, or none, has keys and values.
    """
    types = list(getattr(config, family.blocks_field)) if family.blocks_field else []
    if types and (types.count(FULL) != 1 or RECURRENT in types):
        raise UnsupportedModelError(
            f"An MTP layer must have one block of full attention and no recurrent one to follow the accepted path, but "
            f"{family.blocks_field} is {types}. {OTHER_METHOD}"
        )
    return types


def _block_names(count: int, length: int) -> dict[str, str]:
    """Names of `count` layers of `length` blocks each, which the checkpoint numbers on."""
    names = {}
    for place in range(count if length else 0):
        first, last = place * length, (place + 1) * length - 1
        names[rf"^mtp\.layers\.{last}\.final_layernorm\."] = f"mtp.layers.{place}.post_norm."
        names[rf"^mtp\.layers\.{first}\.(enorm|hnorm|eh_proj)\."] = rf"mtp.layers.{place}.\1."
        for block in range(length):
            names[rf"^mtp\.layers\.{first + block}\.(norm|mixer)\."] = rf"mtp.layers.{place}.mtp_block.{block}.\1."
    return names


def _family(model: PreTrainedModel) -> MtpFamily:
    family = family_of(model.config)
    assert family is not None
    return family


def mtp_logits(mtp: MtpModel, states: torch.Tensor, stage: int = 0) -> torch.Tensor:
    """`(..., vocab_size)` of the head that belongs to layer `stage`, scaled and cut as the main model does.

    Args:
        states: what that layer computed, and the next one reads.
    """
    if isinstance(mtp, FamilyMtp):
        if not mtp.family.chains_norm:
            states = mtp.layers[stage].post_norm(states)
        if mtp.heads:
            logits: torch.Tensor = mtp.heads[stage](states)
            return logits
    return shared_logits(mtp, states)
