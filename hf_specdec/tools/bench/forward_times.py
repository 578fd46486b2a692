"""Times the target's forwards of T tokens a row, for a curve of costs."""

import math
import time
from collections.abc import Sequence
from statistics import median

from hf_specdec.common.tree import DraftTree, TreeBuilder
from hf_specdec.distributed.rank_sync import RankSync
from hf_specdec.engine.cost.cost_model import ORDER, CostCurve
from hf_specdec.forward.target.model_runner import ModelRunner


def time_forwards(
    target: ModelRunner,
    curve: CostCurve,
    roots: Sequence[int],
    *,
    vocab_size: int,
    largest: int,
    seconds: float,
    rounds: int,
    rank_sync: RankSync | None = None,
) -> dict[int, float]:
    """Time forwards of different sizes after the target's cached texts; the cache is left as it was.

    Args:
        curve: what is known so far, the time of one token among it; gets the results.
        roots: the last token of each row's text.
        largest: most columns a row.
        seconds: when to stop; no forward begins that would end later.
        rounds: times that each size is tried, where there is time.
        rank_sync: of the processes that compute the forwards together; the first one's clock decides.

    Returns:
        The median seconds of each size.
    """
    rank_sync = rank_sync or RankSync()
    times: dict[int, list[float]] = {}
    largest = min(largest, 2 * vocab_size) if target.tier == "tree" else largest
    waiting = [size for size in ORDER if size <= largest] * rounds
    begun = time.perf_counter()

    def following() -> int:
        """The next size that there is time for, 0 at the end."""
        one = median(times[1]) if 1 in times else curve.seconds_of_one or 0.0
        while waiting:
            size = waiting.pop(0)
            if time.perf_counter() - begun + one * curve.ratio(size) <= seconds:
                return size
        return 0

    while size := rank_sync.decide_now(following):
        trees: list[DraftTree | None] = [_of_size(root, size, vocab_size, target.tier == "tree") for root in roots]
        start = time.perf_counter()
        with rank_sync.forward():
            rows = target.forward(trees)
            float(rows[0][-1, 0])  # waits for a device that computes on its own
        target.commit([[] for _ in roots])
        times.setdefault(size, []).append(time.perf_counter() - start)
    found = {size: median(tries) for size, tries in sorted(times.items())}
    if len(found) > 1 and 1 in found:
        curve.set(found)
    return found


def _of_size(root: int, size: int, vocab_size: int, takes_trees: bool) -> DraftTree:
    """A tree of branches two tokens long, of at most 2 * `vocab_size` nodes, or a chain."""
    if not takes_trees or size == 1:
        return DraftTree.chain(root, [place % vocab_size for place in range(size - 1)])
    builder = TreeBuilder(root)
    place = 0
    while len(builder) < size:
        node = builder.add(0, place)
        if len(builder) < size:
            builder.add(node, math.ceil(place / 2) % vocab_size)
        place += 1
    return builder.build()
