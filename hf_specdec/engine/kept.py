"""The cache around a forward of several tokens: what stays of it, and what the caller's own cache holds in the end.

cache = kept_cache(model_kwargs["past_key_values"], reserve=512)
model(..., past_key_values=cache.model_cache)
cache.commit(path, num_nodes)
cache.close()
"""

from typing import Any, Protocol

from hf_specdec import compat
from hf_specdec.cache import SpecCache
from hf_specdec.errors import UnsupportedModelError

__all__ = ["KeptCache", "kept_cache"]


class KeptCache(Protocol):
    """What the engine asks of a cache. `model_cache` is what the model's forward gets; only some keep any path."""

    model_cache: Any
    takes_trees: bool

    def settle(self) -> None:
        """Take over the prompt's columns."""

    def commit(self, path: list[int], num_nodes: int) -> None:
        """Keep the columns in `path` of the `num_nodes` written last."""

    def rollback(self) -> None:
        """Forget a forward that did not finish."""

    def close(self) -> None:
        """Leave the caller's cache as plain generation would."""


def kept_cache(cache: Any, *, reserve: int) -> KeptCache:
    """The best way to keep `cache`, with room for `reserve` tokens where that can be said beforehand.

    Raises:
        UnsupportedModelError: it is no cache that could be rolled back.
    """
    inner = getattr(cache, "self_attention_cache", cache)
    if not isinstance(inner, compat.DynamicCache):
        raise UnsupportedModelError("the cache is not one of transformers' dynamic key/value caches")
    if inner.layers and all(inner.is_linear):
        raise UnsupportedModelError("a recurrent state cannot be rolled back")
    spec = SpecCache.adopt(inner, reserve=reserve)
    return _Adopted(cache, spec) if spec is not None else _Cropped(cache)


class _Adopted:
    """Attention only: a `SpecCache` in place of the caller's cache, which gets the text's columns in the end."""

    takes_trees = True

    def __init__(self, original: Any, spec: SpecCache) -> None:
        self.spec = spec
        self.original = getattr(original, "self_attention_cache", original)
        self.model_cache: Any = spec
        if isinstance(original, compat.EncoderDecoderCache):
            self.model_cache = compat.EncoderDecoderCache(spec, original.cross_attention_cache)
            self.model_cache.is_updated = original.is_updated

    def settle(self) -> None:
        self.spec.settle()

    def commit(self, path: list[int], num_nodes: int) -> None:
        self.spec.commit([path])

    def rollback(self) -> None:
        self.spec.rollback()

    def close(self) -> None:
        self.spec.hand_back(self.original)


class _Cropped:
    """Convolution states beside attention: the caller's own cache, cropped after each forward. Chains only."""

    takes_trees = False

    def __init__(self, original: Any) -> None:
        self.model_cache = original
        self._layers = getattr(original, "self_attention_cache", original).layers
        self._recorded = [getattr(layer, "record_past", None) for layer in self._layers]
        original.activate_past_recording()

    def settle(self) -> None:
        if not self.model_cache.is_croppable:
            raise UnsupportedModelError("a recurrent state cannot be rolled back")
        self.model_cache.crop(0)

    def commit(self, path: list[int], num_nodes: int) -> None:
        assert path == list(range(len(path))), "only a chain can be kept by cropping"
        self.model_cache.crop(len(path) - num_nodes)

    def rollback(self) -> None:
        """A half-written state stays half-written, as an interrupted forward leaves it in plain generation."""

    def close(self) -> None:
        for layer, recorded in zip(self._layers, self._recorded, strict=False):
            if recorded is not None:
                layer.record_past = recorded
