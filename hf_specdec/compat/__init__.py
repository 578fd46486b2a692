"""Every name of transformers that is private or may move, each with the reason it is needed.

Nothing else in the package imports a private transformers name. Tried with transformers 5.23.

    Names                        Why
    cache layers                 `SpecCache` subclasses one and converts to and from the others
    mask functions               a tree's mask is the model's own mask evaluated at the nodes' positions
    `_sample`                    plain decoding, where a model allows nothing else
    `_assisted_decoding`         `engine="assisted"` runs our drafters in transformers' loop
    `_prefill`, `_prepare_cache_for_generation`, `_prepare_position_ids_for_generation`,
    `_update_model_kwargs_for_generation`, `_mask_length`
                                 the prompt's forward with all of `generate`'s rules (multimodal inputs, embeddings,
                                 continued caches, chunks) is transformers' own
    `torch._dynamo.mark_static_address`
                                 CUDA graphs skip forwards that write into buffers without it, as `StaticCache` knows
"""

import copy
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

import torch
from transformers import GenerationConfig, GenerationMixin, LogitsProcessor, PreTrainedModel, cache_utils
from transformers.cache_utils import (
    Cache,
    CacheLayerMixin,
    DynamicCache,
    DynamicLayer,
    DynamicSlidingWindowLayer,
    EncoderDecoderCache,
    QuantizedCache,
    StaticCache,
    StaticLayer,
    StaticSlidingWindowLayer,
)
from transformers.generation import GenerationMode
from transformers.generation.stopping_criteria import (
    EosTokenCriteria,
    MaxLengthCriteria,
    MaxTimeCriteria,
    StopStringCriteria,
)
from transformers.masking_utils import (
    ALL_MASK_ATTENTION_FUNCTIONS,
    AttentionMaskInterface,
    create_masks_for_generate,
)
from transformers.modeling_outputs import BaseModelOutput
from transformers.utils import ModelOutput

from hf_specdec.compat.caches import (
    DummyLayer,
    cache_name,
    cached_length,
    can_crop,
    can_reorder,
    holds_states,
    is_users_own,
    replaced_attributes,
)
from hf_specdec.compat.settings import dropped_settings, keep_own_settings

__all__ = [
    "PROCESSORS_MODULE",
    "Cache",
    "CacheLayerMixin",
    "DummyLayer",
    "DynamicCache",
    "DynamicLayer",
    "DynamicSlidingWindowLayer",
    "Encoded",
    "EncoderDecoderCache",
    "EosTokenCriteria",
    "MaxLengthCriteria",
    "MaxTimeCriteria",
    "ModelOutput",
    "QuantizedCache",
    "StaticCache",
    "StaticLayer",
    "StaticSlidingWindowLayer",
    "StopStringCriteria",
    "assisted_decoding",
    "attends_only",
    "attention_implementation",
    "cache_name",
    "cached_length",
    "can_crop",
    "can_reorder",
    "dropped_settings",
    "execution_device",
    "fresh_cache",
    "generation_model",
    "has_own_cache",
    "has_own_input_preparation",
    "has_own_masks",
    "holds_states",
    "ignores_positions",
    "input_device",
    "is_compiled",
    "is_dispatched",
    "is_users_own",
    "keep_own_settings",
    "knows_windows",
    "mark_static_address",
    "mask_config",
    "mask_function_of",
    "masks_for_forward",
    "max_positions",
    "own_positions",
    "prefill",
    "private_config",
    "prompt_length",
    "register_mask_function",
    "replaced_attributes",
    "sample",
    "set_attention_implementation",
    "text_config",
    "unbounded_layers",
    "updated_kwargs",
]

PROCESSORS_MODULE = LogitsProcessor.__module__  # of transformers' own logits processors


@dataclass
class Encoded(BaseModelOutput):
    """What an encoder returns; some decoders ask it for a mask."""

    attention_mask: torch.Tensor | None = None


def generation_model(model: Any) -> Any:
    """The transformers model inside `torch.compile`'s wrapper and PEFT's, or `model` itself."""
    model = getattr(model, "_orig_mod", model)  # torch.compile(model)
    if hasattr(model, "peft_config") and hasattr(model, "get_base_model"):
        return model.get_base_model()
    return model


def is_dispatched(model: PreTrainedModel) -> bool:
    """Whether accelerate's hooks move what goes through the model: it is spread over devices, or offloaded."""
    places = set((getattr(model, "hf_device_map", None) or {}).values())
    return len(places) > 1 or any("_hf_hook" in vars(module) for module in model.modules())


def input_device(model: PreTrainedModel) -> torch.device:
    """Where inputs go; the embeddings' execution device under accelerate's offloading."""
    found = execution_device(model) or execution_device(model.get_input_embeddings())
    device: torch.device = model.device
    return found or device


def execution_device(module: Any) -> torch.device | None:
    """Where accelerate's hook on a module brings its weights for the forward; `None` where there is no hook."""
    device = getattr(getattr(module, "_hf_hook", None), "execution_device", None)
    return None if device is None else torch.device(device)


def text_config(config: Any) -> Any:
    """The decoder's configuration of a composite model, or `config` itself."""
    return config.get_text_config(decoder=True)


def mask_config(config: Any) -> Any:
    """The part of a configuration that mask functions read.

    Of an encoder-decoder with one flat configuration, `get_text_config` returns a deep copy, which nobody else reads.
    """
    text = text_config(config)
    is_part = text is config or not config.is_encoder_decoder or any(value is text for value in vars(config).values())
    return text if is_part else config


def private_config(config: Any) -> Any:
    """A shallow copy, and a copy of its text part, to be changed without anyone else noticing."""
    own, text = copy.copy(config), text_config(config)
    if text is config:
        return own
    for name, value in vars(config).items():
        if value is text:
            object.__setattr__(own, name, copy.copy(text))
    return own


def max_positions(config: Any) -> int | None:
    """Positions that a model has, where it has an end; some configurations say -1 for none."""
    text = text_config(config)
    positions = getattr(text, "max_position_embeddings", getattr(text, "max_seq_len", None))
    return positions if isinstance(positions, int) and positions > 0 else None


def ignores_positions(config: Any) -> bool:
    """Whether a model makes ALiBi's bias from its columns although its forward takes positions, as Falcon's does."""
    return getattr(text_config(config), "alibi", False) is True


def attends_only(model: PreTrainedModel) -> bool:
    """Whether the model's cache consists of transformers' own attention layers."""
    known = (DynamicLayer, DynamicSlidingWindowLayer, DummyLayer)
    return all(type(layer) in known for layer in getattr(fresh_cache(model).get("past_key_values"), "layers", []))


def has_own_cache(model: PreTrainedModel) -> bool:
    """Whether the model's cache has layers that the model's own file defines."""
    layers = getattr(fresh_cache(model).get("past_key_values"), "layers", [])
    return any(type(layer).__module__ != cache_utils.__name__ for layer in layers)


def attention_implementation(config: Any) -> str | None:
    """Name of the attention implementation of the decoder."""
    return cast("str | None", text_config(config)._attn_implementation)


def set_attention_implementation(config: Any, name: str) -> None:
    """Set the decoder's attention implementation on a private configuration and nowhere else."""
    object.__setattr__(mask_config(config), "_attn_implementation_internal", name)


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
    within: bool = False,
) -> Any:
    """What the model's own code would make of `config`: a 4-D mask or a dict with one per kind of layer.

    `shape` is (batch, T). The model's `create_masks_for_generate` is used where it has its own, unless the mask is for
    layers `within` the model: BLOOM's leaves 4-D masks to the model's forward.
    """
    own = getattr(model, "create_masks_for_generate", create_masks_for_generate)
    create = create_masks_for_generate if within else own
    return create(
        config=config,
        inputs_embeds=torch.empty((*shape, 0), dtype=model.dtype, device=position_ids.device),
        attention_mask=attention_mask,
        past_key_values=cache,
        position_ids=position_ids,
    )


def fresh_cache(model: PreTrainedModel, batch_size: int = 1) -> dict[str, Any]:
    """The cache that `generate` would begin with, under its name; nothing where the model makes its own."""
    kwargs: dict[str, Any] = {}
    model._prepare_cache_for_generation(GenerationConfig(), kwargs, GenerationMode.GREEDY_SEARCH, batch_size, 0)
    return kwargs


def own_positions(model: PreTrainedModel, input_ids: torch.Tensor, model_kwargs: dict[str, Any]) -> torch.Tensor:
    """The `position_ids` that `generate` makes for a prompt; some models count in several dimensions."""
    return cast("torch.Tensor", model._prepare_position_ids_for_generation(input_ids, model_kwargs))


def mark_static_address(tensor: torch.Tensor) -> None:
    """Tell compiled forwards that the tensor stays where it is, so that CUDA graphs may write into it."""
    torch._dynamo.mark_static_address(tensor)


def unbounded_layers(cache: StaticCache, model: PreTrainedModel) -> list[Any]:
    """The layers that `cache` would have if it were longer than any text: what bounds them is the model's window."""
    layers: list[Any] = StaticCache(config=text_config(model.config), max_cache_len=1 << 40).layers
    return layers if len(layers) == len(cache.layers) else cache.layers


def prompt_length(input_ids: torch.Tensor, generation_config: GenerationConfig, model_kwargs: dict[str, Any]) -> int:
    """Tokens that the cache holds once the prompt is read, those of earlier turns counted."""
    mask = model_kwargs.get("attention_mask")
    known = mask.shape[1] if isinstance(mask, torch.Tensor) else getattr(generation_config, "_mask_length", 0)
    return max(int(known), input_ids.shape[1])


def is_compiled(model: PreTrainedModel) -> bool:
    """Whether a forward of the model, or of a part of it, may run without the hooks that are set on its submodules."""
    return any(
        getattr(module, "_compiled_call_impl", None) is not None  # of torch, set by `module.compile()`
        or hasattr(vars(module).get("forward"), "_torchdynamo_orig_callable")  # by `torch.compile(module.forward)`
        for module in model.modules()
    )


def knows_windows(model: PreTrainedModel) -> bool:
    """Whether any of the model's code makes masks with a window or blocks; code from a hub may have its own ways."""
    names = ("create_sliding_window_causal_mask", "create_chunked_causal_mask", "create_masks_for_generate")
    modules = [sys.modules.get(name) for name in {type(module).__module__ for module in model.modules()}]
    return model.is_remote_code() or any(hasattr(module, name) for module in modules for name in names)


def has_own_masks(model: PreTrainedModel) -> bool:
    """Whether the model's class makes its masks itself."""
    return hasattr(model, "create_masks_for_generate")


def has_own_input_preparation(model: PreTrainedModel) -> bool:
    """Whether the model's class prepares its inputs itself, so that each forward has to ask it."""
    return (
        type(model).prepare_inputs_for_generation is not GenerationMixin.prepare_inputs_for_generation
        or "prepare_inputs_for_generation" in vars(model)
        or model.is_remote_code()
    )


def prefill(
    model: PreTrainedModel, input_ids: torch.Tensor, generation_config: GenerationConfig, model_kwargs: dict[str, Any]
) -> Any:
    """The prompt's forward, by transformers' rules; returns the model's output."""
    return model._prefill(input_ids, generation_config, model_kwargs)


def updated_kwargs(model: PreTrainedModel, outputs: Any, model_kwargs: dict[str, Any]) -> dict[str, Any]:
    """`model_kwargs` after one more token: masks, positions and token types extended by it."""
    kwargs = model._update_model_kwargs_for_generation(
        outputs, model_kwargs, is_encoder_decoder=model.config.is_encoder_decoder
    )
    return cast("dict[str, Any]", kwargs)


def sample(model: PreTrainedModel, input_ids: torch.Tensor, **kwargs: Any) -> Any:
    """transformers' own greedy search or sampling."""
    return type(model)._sample(model, input_ids, **kwargs)


def assisted_decoding(model: PreTrainedModel, candidate_generator: Any, input_ids: torch.Tensor, **kwargs: Any) -> Any:
    """transformers' own assisted decoding, with `candidate_generator` as its source of candidates."""
    return type(model)._assisted_decoding(_WithCandidates(model, candidate_generator), input_ids, **kwargs)


class _WithCandidates:
    """Stands in for the model inside the assisted loop: the same in everything but where candidates come from."""

    def __init__(self, model: PreTrainedModel, candidate_generator: Any) -> None:
        self._model, self._candidate_generator = model, candidate_generator

    def _get_candidate_generator(self, **kwargs: Any) -> Any:
        return self._candidate_generator

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._model(*args, **kwargs)

    @property
    def device(self) -> torch.device:
        return input_device(self._model)  # the model's own is `meta` where its embeddings are offloaded

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)
