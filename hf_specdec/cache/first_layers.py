"""The first layers of a cache, driven by themselves between two commits of all layers.

A draft of the target's first layers writes its columns where the target's own will stand.
"""

from hf_specdec.cache.spec_cache import SpecCache
from hf_specdec.cache.spec_layer import SpecLayer
from hf_specdec.cache.static_cache import StaticSpecCache


class FirstLayers:
    """The first `count` layers of `whole`, which keeps them.

    Attributes:
        cache (`SpecCache`): these layers as a cache of their own.
    """

    def __init__(self, whole: SpecCache, count: int) -> None:
        self.whole = whole
        layers = whole.layers[:count]
        is_static = isinstance(whole, StaticSpecCache)
        self.cache = _StaticPart(layers, whole) if is_static else SpecCache(layers, reserve=whole.reserve)

    def begin(self) -> None:
        """A round begins: nothing is uncommitted."""
        self.cache.sync()

    def drop(self) -> None:
        """The round is over: what it has written counts as free; the columns' content stays until it is overwritten."""
        self.whole.rollback()


class _StaticPart(StaticSpecCache):
    """The first layers of a static cache: where they need more room, all layers get it, so that masks fit all."""

    def __init__(self, layers: list[SpecLayer], whole: SpecCache) -> None:
        super().__init__(layers, reserve=whole.reserve)
        self.whole = whole

    def place(self, width: int, *, written: int = 0) -> None:
        for layer in self.whole.layers:
            if isinstance(layer, SpecLayer) and layer.is_initialized:
                layer.make_room(max(self.lengths) + written + width)
        super().place(width, written=written)
