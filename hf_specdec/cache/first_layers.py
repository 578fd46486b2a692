"""The first layers of a cache, driven by themselves between two commits of all layers.

A draft of the target's first layers writes its columns where the target's own would stand. Before the target computes,
the columns are brought into the order of its tree; the layers after the first ones then write theirs besides them.
"""

from collections.abc import Sequence

from hf_specdec.cache.spec_cache import Moves, SpecCache
from hf_specdec.cache.spec_layer import SpecLayer
from hf_specdec.cache.static_cache import StaticSpecCache, StaticSpecLayer


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

    @property
    def starts(self) -> tuple[int, ...]:
        """Each row's length in the cache, where uncommitted columns begin."""
        return self.whole.lengths

    def begin(self) -> None:
        """A round begins: nothing is uncommitted."""
        self.cache.sync()

    def drop(self) -> None:
        """The round is over: what it has written counts as free; the columns' content stays until it is overwritten."""
        self.whole.rollback()

    def move(self, rows: Sequence[int], source: Sequence[int], target: Sequence[int]) -> None:
        """Copy column `source[i]` of row `rows[i]` to column `target[i]`, all at once; columns count from `starts`.

        Layers after the first ones may share a block of memory with them; what they hold in these columns is free.
        """
        moves = Moves.between(self.starts, rows, source, target)
        if moves is not None:
            self.cache.move(moves)

    def count_columns(self, width: int) -> None:
        """The layers after these have written `width` columns: these hold as many."""
        lengths = tuple(start + width for start in self.starts)
        for layer in self._written:
            if not (isinstance(layer, StaticSpecLayer) and layer.static_index is not None):
                layer.set_lengths(lengths)

    @property
    def _written(self) -> list[SpecLayer]:
        return [layer for layer in self.cache.layers if isinstance(layer, SpecLayer) and layer.is_initialized]


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
