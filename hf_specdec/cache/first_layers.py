"""The first layers of a cache: a draft of them writes its columns where the target's own will stand."""

import torch

from hf_specdec.cache.spec_cache import SpecCache
from hf_specdec.cache.spec_layer import SpecLayer
from hf_specdec.cache.static_cache import StaticSpecCache


def first_layers_of(whole: SpecCache, count: int) -> SpecCache:
    """The first `count` layers of `whole`, which keeps them, as a cache of their own."""
    layers = whole.layers[:count]
    return (
        _StaticPart(layers, whole) if isinstance(whole, StaticSpecCache) else SpecCache(layers, reserve=whole.reserve)
    )


class _StaticPart(StaticSpecCache):
    """The first layers of a static cache: where they need more room, all layers get it, so that masks fit all."""

    def __init__(self, layers: list[SpecLayer], whole: SpecCache) -> None:
        super().__init__(layers, reserve=whole.reserve)
        self.whole = whole

    def place(self, width: int, *, written: int = 0, columns: torch.Tensor | None = None) -> None:
        for layer in self.whole.layers:
            if isinstance(layer, SpecLayer) and layer.is_initialized:
                layer.make_room(max(self.lengths) + written + width)
        super().place(width, written=written, columns=columns)
