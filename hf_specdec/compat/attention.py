"""Attention functions of transformers and torch, their masks, and how both depend on a text's length and positions.

Names                              Why
`sdpa_attention_forward`           what is computed in another way here, unless somebody registers another function
`eager_attention_forward`          of a model's own file: what soft-capping and attention sinks mean for that model; the
                                   core takes its place in this package's forwards
`_can_set_attn_implementation`, `_supports_sdpa`, `_supports_attention_backend`
                                   models with attention code of their own take a foreign mask for theirs
mask functions                     a tree's mask is the model's own mask evaluated at the nodes' positions
`_attn_implementation`             names the mask function, on a private copy of the configuration
`_buffers`                         hold tables of positions
`rope_type`                        how `dynamic_rope_update` works, by the last position of a forward
`original_max_position_embeddings`
                                   where long-rope changes its frequencies, and where Phi-3 drops its cache
`floor_scale`, `attn_temperature_tuning`, `use_rope`
                                   attention that Llama 4 scales by columns of the cache
`Tensor._version`                  tells a mask that was changed in place from the one that something was made of
"""

import functools
import inspect
from collections.abc import Callable, Iterable, Iterator
from types import CodeType, FunctionType
from typing import Any, cast

import torch
from transformers import AttentionInterface, GenerationMixin, PreTrainedModel
from transformers.cache_utils import Cache
from transformers.integrations.sdpa_attention import sdpa_attention_forward as sdpa_attention_forward
from transformers.masking_utils import (
    ALL_MASK_ATTENTION_FUNCTIONS,
    AttentionMaskInterface,
    create_masks_for_generate,
)
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from hf_specdec.compat.caches import CACHE
from hf_specdec.compat.generation import has_own_cache, has_own_input_preparation
from hf_specdec.compat.models import innermost_decoder, input_embeddings, named_positions, text_config
from hf_specdec.compat.modules import modules_of

EAGER = "eager_attention_forward"
# transformers' own functions that make something else than a 4-D tensor, under the names they are registered with.
MASKS_OF_OTHER_KINDS = ("flash_attention_2", "flex_attention")


def attention_function_of(implementation: str) -> Callable[..., Any] | None:
    """The attention function that is registered under a name, or `None`; `"eager"` stands for each model's own."""
    return cast("Callable[..., Any] | None", AttentionInterface().get(implementation))


def register_attention(name: str, function: Callable[..., Any]) -> None:
    """Offer an attention function to all models."""
    AttentionInterface.register(name, function)


def takes_tensor_masks(implementation: str | None) -> bool:
    """Returns whether an attention implementation is given its mask as a 4-D tensor, which may hide anything.

    FlashAttention's has two dimensions and flex's is compiled; where no mask is made, there is none to be changed.
    """
    make = mask_function_of(implementation)
    return make is not None and make not in map(mask_function_of, MASKS_OF_OTHER_KINDS)


def can_set_attention(model: PreTrainedModel) -> bool:
    """True if all of the model's attention asks transformers' interface for its function, and masks all of its keys.

    The first flag is true where any of it asks: a part with code of its own may be left. A model that torch's attention
    is not offered for, and that keeps more than keys and values, extends masks of its own kind only.
    """
    cls: Any = type(model)
    by_interface = cls._supports_sdpa or (cls._supports_attention_backend and not has_own_cache(model))
    return bool(cls._can_set_attn_implementation() and by_interface)


def asks_for_attention(model: PreTrainedModel) -> bool:
    """True if the model's attention asks transformers' interface for its function, any part of it."""
    return bool(model._supports_attention_backend)


def eager_attention_of(module: torch.nn.Module) -> Callable[..., Any] | None:
    """The plain attention function of the file that defines the module, or `None` where it has none of that name."""
    return cast("Callable[..., Any] | None", _file_of(type(module)).get(EAGER))


def files_with_eager_attention(model: torch.nn.Module) -> list[dict[str, Any]]:
    """The namespaces of the files that define the model's modules and have such a function, under `EAGER`."""
    files = {id(file): file for cls in set(map(type, modules_of(model))) if EAGER in (file := _file_of(cls))}
    return list(files.values())


def _file_of(cls: type) -> dict[str, Any]:
    forward: Any = inspect.unwrap(cls.forward)  # type: ignore[attr-defined]
    return getattr(forward, "__globals__", {})


def version_of(tensor: torch.Tensor) -> int | None:
    """A number that changes with every change in place, or `None` where torch does not count them."""
    return None if tensor.is_inference() else tensor._version


MASKED = ("sdpa", "eager")  # attention that takes any mask
WINDOWED = {"create_sliding_window_causal_mask", "create_chunked_causal_mask", "create_masks_for_generate"}


def mask_config(config: Any) -> Any:
    """The part of a configuration that mask functions read.

    Of an encoder-decoder with one flat configuration, `get_text_config` returns a deep copy, which no one else reads.
    """
    text = text_config(config)
    is_part = text is config or not config.is_encoder_decoder or any(value is text for value in vars(config).values())
    return text if is_part else config


def attention_functions() -> tuple[dict[str, Any], ...]:
    """The functions of all attention implementations, by name: those of models, and those that were registered."""
    return ALL_ATTENTION_FUNCTIONS._local_mapping, AttentionInterface._global_mapping


def attention_implementation(config: Any) -> str | None:
    """Name of the attention implementation of the decoder."""
    return cast("str | None", text_config(config)._attn_implementation)


def set_attention_implementation(config: Any, name: str) -> None:
    """Set the decoder's attention implementation on a private configuration and nowhere else."""
    object.__setattr__(mask_config(config), "_attn_implementation_internal", name)


def drop_empty_layer_types(config: Any) -> None:
    """Take `"layer_types": null` out of a private configuration: transformers asks only whether the name is there."""
    values = vars(mask_config(config))
    if "layer_types" in values and values["layer_types"] is None:
        del values["layer_types"]


def mask_function_of(implementation: str | None) -> Callable[..., Any] | None:
    """transformers' mask function for an attention implementation, or `None` where it has none."""
    return cast("Callable[..., Any] | None", ALL_MASK_ATTENTION_FUNCTIONS.get(implementation))


def register_mask_function(name: str, function: Callable[..., Any]) -> None:
    """Add a mask function under a name of our own; no existing name is replaced."""
    AttentionMaskInterface.register(name, function)


def masks_for_forward(
    model: PreTrainedModel,
    config: Any,
    *,
    shape: tuple[int, int],
    attention_mask: torch.Tensor | None,
    cache: Cache,
    position_ids: torch.Tensor,
) -> Any:
    """Masks that the model's own code makes for `config`: a 4-D mask or a dict with one per kind of layer.

    `shape` is (batch, T). The model's `create_masks_for_generate` is used where it has its own.
    """
    create = getattr(model, "create_masks_for_generate", create_masks_for_generate)
    return create(
        config=config,
        inputs_embeds=torch.empty((*shape, 0), dtype=model.dtype, device=position_ids.device),
        attention_mask=attention_mask,
        position_ids=position_ids,
        **{CACHE: cache},
    )


def counts_masks_in_columns(model: PreTrainedModel) -> bool:
    """True if layers cut masks and windows out of a table by columns of the cache, not by positions, as GPT-Neo's."""
    return any(getattr(module, "attention_type", None) in ("global", "local") for module in modules_of(model))


def knows_windows(model: PreTrainedModel) -> bool:
    """True if methods of the model's classes make masks with a window or blocks; a hub's may have its own ways.

    Another class of the same file does not count: a part of the model that is not there may be the one with windows.
    """
    bases = {base for kind in set(map(type, modules_of(model))) for base in kind.__mro__} - {GenerationMixin}
    methods = [method for base in bases for method in vars(base).values() if isinstance(method, FunctionType)]
    called = [
        inspect.unwrap(method).__globals__.get(name) for method in methods for name in names_read(method)
    ]  # of their files
    functions = [*methods, *(function for function in called if isinstance(function, FunctionType))]
    return model.is_remote_code() or any(WINDOWED & names_read(function) for function in functions)


@functools.cache
def names_read(function: Any) -> frozenset[str]:
    """Names that a function and those defined within it read, whatever wraps it."""
    function = inspect.unwrap(function)
    codes = [function.__code__] if isinstance(function, FunctionType) else []
    for code in codes:  # which grows
        codes += [constant for constant in code.co_consts if isinstance(constant, CodeType)]
    return frozenset(name for code in codes for name in code.co_names)


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
    """Columns of the cache from which on attention is scaled by their number, whatever the positions are (Llama 4)."""
    modules: list[Any] = modules_of(model)
    attention = [module for module in modules if hasattr(module, "floor_scale")]
    scaled = (int(module.floor_scale) for module in attention if module.attn_temperature_tuning and not module.use_rope)
    return min(scaled, default=None)
