"""Names and signs of the places that drafted tokens come from. Colours and lines are in the style sheet."""

from collections.abc import Iterable

from hf_specdec.methods.common.entry import Source
from hf_specdec.methods.registry import sources

TARGET = Source("target", "the target's own", "chosen by the model itself, not drafted", "", "target")
DRAFTED = Source("draft", "drafted", "drafted", "", "draft")  # where a drafter does not say from where


def source_of(key: str) -> Source:
    """The source that a drafted node names."""
    return {TARGET.key: TARGET, **sources()}.get(key, DRAFTED)


def source_class(key: str) -> str:
    """The class that gives a source its colour and its line."""
    return f"hs-s-{source_of(key).style}"


def draw_legend(keys: Iterable[str]) -> str:
    """The meaning of the colours and lines of these sources, in a fixed order."""
    wanted = {source_of(key) for key in keys}
    items = [
        f'<li><span class="hs-t hs-s-{source.style}">{source.label}</span> <small>{source.meaning}</small></li>'
        for source in (TARGET, *sources().values(), DRAFTED)
        if source in {TARGET, *wanted}
    ]
    return f'<ul class="hs-legend" aria-label="Where tokens come from">{"".join(items)}</ul>'
