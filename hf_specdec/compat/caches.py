"""Facts about transformers' caches, and operations on them.

Knows nothing of models.
"""

import inspect
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from transformers import GenerationMixin, PreTrainedModel
from transformers.cache_utils import (
    Cache,
    CacheLayerMixin,
    DynamicCache,
    DynamicLayer,
    EncoderDecoderCache,
    LinearAttentionAndFullAttentionLayer,
    LinearAttentionAndSlidingWindowAttentionLayer,
    LinearAttentionCacheLayerMixin,
)
from transformers.cache_utils import DummyLayer as DummyLayer
from transformers.cache_utils import DynamicSlidingWindowLayer as DynamicSlidingWindowLayer
from transformers.cache_utils import LinearAttentionLayer as LinearAttentionLayer

ATTENTION_LAYERS = (DynamicLayer, DynamicSlidingWindowLayer)
STATE_ATTENTION_LAYERS = (  # which attend and have states
    LinearAttentionAndFullAttentionLayer,
    LinearAttentionAndSlidingWindowAttentionLayer,
)

OLD_NAMES = ("past_key_values", "cache_params")  # before transformers 5.24; `generate` takes them under both
_HAS_NEW_NAME = "cache" in inspect.signature(GenerationMixin.prepare_inputs_for_generation).parameters
CACHE = "cache" if _HAS_NEW_NAME else OLD_NAMES[0]  # a cache among the arguments and in the outputs of most models
CACHE_NAMES = ("cache", "state") if _HAS_NEW_NAME else (*OLD_NAMES, "state")  # under which `generate` keeps it
STATIC_NAMES = ("hybrid_chunked", "sliding_window")  # what older checkpoints call a static cache with windows
CACHE_ARGUMENTS = ("cache", *OLD_NAMES) if _HAS_NEW_NAME else OLD_NAMES  # under which callers of `generate` pass it


def _values_keep_dtype() -> bool:
    layer = DynamicLayer()
    layer.lazy_initialization(torch.empty(0), torch.empty(0, dtype=torch.bfloat16))
    return bool(layer.values.dtype == torch.bfloat16)


# Whether transformers' layers keep values in their own dtype, as from 5.24 on, or in the keys': under autocast rotated
# keys are fp32, values are not. A constant, since compiled forwards trace where it is read.
VALUES_KEEP_DTYPE = _values_keep_dtype()


def cache_name(model_kwargs: dict[str, Any]) -> str:
    """The name of the cache among a forward's arguments; `CACHE` where there is none yet."""
    return next((name for name in CACHE_NAMES if model_kwargs.get(name) is not None), CACHE)


def decoding_cache(model: PreTrainedModel, kwargs: dict[str, Any]) -> Any:
    """The cache among a forward's arguments, with one for cross-attention where the model would put one next to it.

    Decoders that are given states do that in their forward (BLIP's, GPT-2), some for a `DynamicCache` alone.
    """
    cache = kwargs.get(cache_name(kwargs))
    is_alone = type(cache) is DynamicCache
    if not is_alone or not passed_states(model, kwargs):
        return cache
    return EncoderDecoderCache(cache, DynamicCache(config=model.config.get_text_config(decoder=True)))


def passed_states(model: PreTrainedModel, kwargs: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """States that a decoder without an encoder attends to besides its text, `(batch, length, hidden_size)`.

    By its argument's name; one, or none.
    """
    if model.config.is_encoder_decoder:
        return {}
    states_by_name: dict[str, Any] = {"encoder_hidden_states": kwargs.get("encoder_hidden_states")}
    if (outputs := kwargs.get("encoder_outputs")) is not None:  # a tuple, or the output of a model
        states_by_name["encoder_outputs"] = outputs if isinstance(outputs, torch.Tensor) else outputs[0]
    return {name: states for name, states in states_by_name.items() if isinstance(states, torch.Tensor)}


def attends_to_images(config: Any) -> tuple[int, ...]:
    """Layers that keep an image's keys and values among the text's, and read them whole (Mllama)."""
    return tuple(getattr(config.get_text_config(decoder=True), "cross_attention_layers", None) or ())


def sees_images(model: PreTrainedModel, kwargs: dict[str, Any]) -> bool:
    """Returns whether a forward has keys and values of images in `attends_to_images`, cached or to be computed."""
    layers = attends_to_images(model.config)
    if not layers or any(kwargs.get(name) is not None for name in ("pixel_values", "cross_attention_states")):
        return bool(layers)
    cached = getattr(kwargs.get(cache_name(kwargs)), "layers", [])
    return any(place < len(cached) and cached[place].get_seq_length() for place in layers)


def under_new_name(kwargs: dict[str, Any]) -> dict[str, Any]:
    """Arguments of `generate` with the cache under transformers' present name."""
    old = next((name for name in CACHE_ARGUMENTS[1:] if name in kwargs), None)
    if old is None or CACHE in kwargs or not _HAS_NEW_NAME:
        return kwargs
    return {CACHE if name == old else name: value for name, value in kwargs.items()}


def cached_length(cache: Any) -> int | None:
    """Tokens in a cache; `None` for those that do not count them."""
    try:
        return int(cache.get_seq_length())
    except (AttributeError, ValueError):  # no cache of transformers; recurrent layers only
        return None


def is_users_own(cache: Any) -> bool:
    """Returns whether a cache was given to `generate`, so that somebody will look at it."""
    return bool(getattr(cache, "_is_user_defined", False))


def crop_to(cache: Cache, length: int) -> bool:
    """Keep the first `length` of a cache's tokens; returns whether it could, which it can without windows or states."""
    if not all(type(layer) is DynamicLayer for layer in cache.layers):
        return False
    cache.crop(length - cache.get_seq_length())
    return True


def recorded(cache: Any) -> list[tuple[Any, bool]]:
    """The layers of a cache that can keep what they would drop, for a crop, and whether they do."""
    layers = getattr(getattr(cache, "self_attention_cache", cache), "layers", [])
    return [(layer, layer.record_past) for layer in layers if getattr(layer, "record_past", None) is not None]


def record_as(layers: Iterable[tuple[Any, bool]]) -> None:
    """Let layers keep what `recorded` said; transformers' assisted decoding leaves them recording."""
    for layer, keeps in layers:
        layer.record_past = keeps


def holds_states(value: Any) -> bool:
    """True if the attributes of an object are part of a cache's content: caches, some of no common base, and layers."""
    kinds = (Cache, CacheLayerMixin, LinearAttentionCacheLayerMixin)  # the last of no common base with the second
    return isinstance(value, kinds) or type(value).__name__.endswith("Cache")


def replaced_attributes(layer: Any) -> tuple[str, ...]:
    """Attributes of a cache layer that a forward replaces by new tensors, and never writes into."""
    update = getattr(type(layer), "update", None)
    replaces = update in (DynamicLayer.update, DynamicSlidingWindowLayer.update)
    return ("keys", "values") if replaces else ()


def contents(value: Any) -> Iterator[torch.Tensor]:
    """Tensors in a cache, its layers and their lists and dictionaries, in the order of its attributes."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for item in value:
            yield from contents(item)
    elif isinstance(value, dict):
        yield from contents(list(value.values()))
    elif holds_states(value):
        yield from contents(vars(value))
