"""Dependence on a text's length: rotary modules, position tables, scales of attention, caches computed anew.

Names                        Why
`rope_type`                  how `dynamic_rope_update` works, by the last position of a forward
`original_max_position_embeddings`
                             where long-rope changes its frequencies, and where Phi-3 drops its cache
`floor_scale`, `attn_temperature_tuning`, `use_rope`
                             attention that Llama 4 scales by columns of the cache
`_buffers`                   tables of positions and masks, found in half the time that torch's own iteration takes
"""

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from transformers import PreTrainedModel

from hf_specdec.compat.attention import tables_of_masks
from hf_specdec.compat.generation import has_own_input_preparation
from hf_specdec.compat.models import innermost_decoder, input_embeddings, named_positions, text_config
from hf_specdec.compat.modules import modules_of

GROWING, SWITCHING = "dynamic", "longrope"
OFFSETS = 8  # rows that a position table may have in front of the first position
EVERY_MODULES = vars(torch.nn.Module()).keys()  # attributes


def rotary_modules(model: torch.nn.Module) -> tuple[torch.nn.Module, ...]:
    """The rotary modules of a model; how they compute may change."""
    return tuple(module for module in modules_of(model) if "rope_type" in vars(module))


def rotary_switch(modules: Iterable[Any]) -> int | None:
    """The length up to which rotary modules have their original frequencies; `None` where always."""
    return min((length for module in modules for length in _switches(module)), default=None)


def _switches(module: Any) -> Iterator[int]:
    """Lengths at which the frequencies of the module's layer types change."""
    kinds = vars(module).get("rope_type")
    kinds = kinds if isinstance(kinds, dict) else {None: kinds}
    for layer, kind in kinds.items() if hasattr(module, "original_max_seq_len") else ():
        if isinstance(kind, str) and GROWING in kind:
            yield int(module.original_max_seq_len)
        elif kind == SWITCHING:
            parameters = module.config.rope_parameters
            parameters = parameters if layer is None else parameters[layer]
            yield int(parameters["original_max_position_embeddings"])


def position_limit(model: PreTrainedModel, *, reach: int | None = None) -> int | None:
    """Positions of a model that looks them up in a table; `None` where there is no table, as with rotary positions.

    Sinusoidal tables that their module extends (`make_weights`, as XGLM's) end nowhere. A bias that is made as long as
    the configuration says (`build_mpt_alibi_tensor`) is a table.

    Of several numbers in the configuration the one counts that the decoder's table has.

    Args:
        reach: positions that are wanted; where the configuration has as many, no table is looked for.
    """
    named = named_positions(text_config(model.config))
    if not named or (reach is not None and reach <= min(named)):
        return None
    words = {id(module) for module in (input_embeddings(model), model.get_output_embeddings())}
    for module in modules_of(innermost_decoder(model) or model):
        if hasattr(module, "build_mpt_alibi_tensor"):
            return named[0]
        if not isinstance(module, torch.nn.Embedding):
            sizes = [] if callable(getattr(module, "make_weights", None)) else _table_sizes(module)
        else:
            sizes = [] if id(module) in words else [module.num_embeddings]
        limits = [positions for size in sizes for positions in named if positions <= size <= positions + OFFSETS]
        if limits:
            return max(limits)
    return None


def _table_sizes(module: torch.nn.Module) -> list[int]:
    """Sizes of the tables that a module holds besides its weights."""
    attributes = vars(module)
    values = [attributes[name] for name in attributes.keys() - EVERY_MODULES]
    tensors = [value for value in (*attributes["_buffers"].values(), *values) if isinstance(value, torch.Tensor)]
    return [size for tensor in tensors if tensor.ndim > 1 for size in tensor.shape]


def cache_drop_length(model: PreTrainedModel) -> int | None:
    """The longest text whose cache a model goes on with, where its class may compute longer ones anew (Phi-3)."""
    length = getattr(text_config(model.config), "original_max_position_embeddings", None)
    return length if isinstance(length, int) and has_own_input_preparation(model) else None


def scaled_length(model: PreTrainedModel) -> int | None:
    """Columns of the cache from which on attention goes by their number, whatever the positions are; or `None`.

    Llama 4 scales by them; GPT-Neo has a table of masks with as many columns as there are positions.
    """
    modules: list[Any] = modules_of(model)
    attention = [module for module in modules if hasattr(module, "floor_scale")]
    scaled = [int(module.floor_scale) for module in attention if module.attn_temperature_tuning and not module.use_rope]
    return min([*scaled, *(table.shape[-1] for table in tables_of_masks(model))], default=None)
