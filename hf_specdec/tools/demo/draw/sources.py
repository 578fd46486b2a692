"""Names and signs of the places that drafted tokens come from. Colours and lines are in the style sheet."""

from collections.abc import Iterable

HEADS = ("eagle3", "mtp", "dflash")  # a race has one of them, and they share a sign
SOURCE_NAMES = {
    "target": "the target's own",
    "text": "this text",
    "earlier_texts": "earlier texts",
    "recycled_logits": "recycled logits",
    "window": "window",
    "draft_model": "draft model",
    "eagle3": "EAGLE-3 head",
    "mtp": "MTP layers",
    "dflash": "DFlash head",
    "draft": "drafted",
}
LETTERS = {
    "text": "T",
    "earlier_texts": "E",
    "recycled_logits": "R",
    "window": "W",
    "draft_model": "D",
    **dict.fromkeys(HEADS, "H"),
}
MEANINGS = {
    "target": "chosen by the model itself, not drafted",
    "text": "copied from where it stood before in this text",
    "earlier_texts": "copied from an earlier race of yours",
    "recycled_logits": "what the model thought likely after these tokens before",
    "window": "found by lookahead's window of guesses",
    "draft_model": "written by the smaller model",
    "eagle3": "written by a head on the model's hidden states",
    "mtp": "written by the model's own layers for several tokens",
    "dflash": "written by a model that fills in a block of tokens",
    "draft": "drafted",
}


def source_class(source: str) -> str:
    """The class that gives a source its colour and its line."""
    sign = "head" if source in HEADS else source
    return f"hs-s-{sign}" if source in SOURCE_NAMES else "hs-s-draft"


def source_letter(source: str) -> str:
    """A letter for a source where a line is too fine to see."""
    return LETTERS.get(source, "")


def draw_legend(sources: Iterable[str]) -> str:
    """What the colours and lines of these sources mean, in a fixed order."""
    wanted = {"target", *sources}
    items = [
        f'<li><span class="hs-t {source_class(source)}">{name}</span> <small>{MEANINGS[source]}</small></li>'
        for source, name in SOURCE_NAMES.items()
        if source in wanted
    ]
    return f'<ul class="hs-legend" aria-label="Where tokens come from">{"".join(items)}</ul>'
