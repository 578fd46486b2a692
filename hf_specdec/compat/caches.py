"""What can be known and done about transformers' caches from outside.

Knows nothing of models.
"""

from typing import Any

from transformers import cache_utils
from transformers.cache_utils import (
    Cache,
    CacheLayerMixin,
    DummyLayer,
    DynamicCache,
    DynamicLayer,
    DynamicSlidingWindowLayer,
    LinearAttentionCacheLayerMixin,
)

__all__ = [
    "CACHE_NAMES",
    "DummyLayer",
    "cache_name",
    "cached_length",
    "can_crop",
    "can_reorder",
    "crop_to",
    "holds_states",
    "is_users_own",
    "replaced_attributes",
]

CACHE_NAMES = ("past_key_values", "cache_params", "state")  # under which `generate` keeps a model's cache


def cache_name(model_kwargs: dict[str, Any]) -> str:
    """The name of the cache among a forward's arguments; `"past_key_values"` where there is none yet."""
    return next((name for name in CACHE_NAMES if model_kwargs.get(name) is not None), CACHE_NAMES[0])


def cached_length(cache: Any) -> int | None:
    """Tokens in a cache; `None` for those that do not count them."""
    try:
        return int(cache.get_seq_length())
    except (AttributeError, ValueError):  # no cache of transformers; recurrent layers only
        return None


def is_users_own(cache: Any) -> bool:
    """Whether a cache was given to `generate`, so that somebody will look at it."""
    return bool(getattr(cache, "_is_user_defined", False))


def can_crop(cache: Any) -> bool:
    """Whether `crop` undoes a forward on every layer: transformers' own layers, none with a recurrent state."""
    layers = getattr(getattr(cache, "self_attention_cache", cache), "layers", [])
    own = all(type(layer).__module__ == cache_utils.__name__ for layer in layers)
    return bool(layers) and own and isinstance(cache, Cache) and bool(cache.is_croppable)


def crop_to(cache: Cache, length: int) -> bool:
    """Keep the first `length` of a cache's tokens; returns whether it could, which it can without windows or states."""
    if not all(type(layer) is DynamicLayer for layer in cache.layers):
        return False
    cache.crop(length - cache.get_seq_length())
    return True


def can_reorder(cache: Any) -> bool:
    """Whether `reorder_cache` takes any rows of a cache: transformers' own, filled on every layer."""
    return type(cache) is DynamicCache and all(type(layer).__module__ == cache_utils.__name__ for layer in cache.layers)


def holds_states(value: Any) -> bool:
    """Whether the attributes of an object are part of a cache's content: caches, some of no common base, and layers."""
    known = (Cache, CacheLayerMixin, LinearAttentionCacheLayerMixin)  # the last of no common base with the second
    return isinstance(value, known) or type(value).__name__.endswith("Cache")


def replaced_attributes(layer: Any) -> tuple[str, ...]:
    """Attributes of a cache layer that a forward replaces by new tensors, and never writes into."""
    own = getattr(type(layer), "update", None)
    known = own in (DynamicLayer.update, DynamicSlidingWindowLayer.update)
    return ("keys", "values") if known else ()
