"""Figures of a race as data frames, which gradio plots."""

from collections.abc import Sequence
from typing import Any

from hf_specdec.common.stats import SpecStep
from hf_specdec.tools.bench.table import check_pandas
from hf_specdec.tools.demo.record import Lane


def acceptance(lanes: Sequence[Lane]) -> Any:
    """`pandas.DataFrame`: for each lane and place in the draft, the share of steps that accepted a token there."""
    rows = [
        {"lane": lane.label, "place": place, "accepted": len(step.accepted) > place}
        for lane in lanes
        for step in lane.steps
        for place in range(1, _depth(step) + 1)
    ]
    frame = check_pandas().DataFrame(rows, columns=["lane", "place", "accepted"])
    return frame.astype({"accepted": float}).groupby(["lane", "place"], as_index=False).mean()


def times(lanes: Sequence[Lane]) -> Any:
    """`pandas.DataFrame`: milliseconds of a step by lane and part; without drafts, the forward is all of it."""
    rows = []
    for lane in lanes:
        parts = {"verify": lane.seconds_per_step}
        if lane.steps:
            names = ("draft", "verify", "commit")
            parts = {name: sum(getattr(s, f"{name}_seconds") for s in lane.steps) / len(lane.steps) for name in names}
        rows += [{"lane": lane.label, "part": part, "ms": 1000 * seconds} for part, seconds in parts.items()]
    return check_pandas().DataFrame(rows, columns=["lane", "part", "ms"])


def _depth(step: SpecStep) -> int:
    """Tokens of the longest branch of a draft."""
    depths = [0]
    for parent in step.tree.parents[1:]:
        depths.append(depths[parent] + 1)
    return max(depths)
