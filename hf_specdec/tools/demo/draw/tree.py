"""A draft tree as SVG: what was drafted, what was accepted, where the target turned off."""

from collections.abc import Sequence

from hf_specdec.common.stats import SpecStep
from hf_specdec.errors import counted
from hf_specdec.tools.demo.draw.markup import one_line, source_class, source_of
from hf_specdec.tools.demo.record import Words

WIDTH, HEIGHT = 90, 30  # of a node's box
ACROSS, DOWN, INDENT = 118, 44, 34  # from node to node
MARGIN = 14
SIGNS = {"accepted": "\u2713", "rejected": "\u2717", "chosen": "\u25b8"}
Place = tuple[int, int]  # left upper corner of a box


def draw_tree(step: SpecStep, words: Words) -> str:
    """The verified tree of a step and the target's choice: from left to right, and downwards for narrow screens."""
    parents = [*step.tree.parents, step.path[-1]]
    below: list[list[int]] = [[] for _ in parents]
    for number, parent in enumerate(parents[1:], 1):
        below[parent].append(number)
    for children in below:  # what is in the text goes straight on
        children.sort(key=lambda number: (number not in step.path, number != len(parents) - 1, number))
    wide = _drawing("hs-across", step, words, parents, _across(parents, below))
    return wide + _drawing("hs-down", step, words, parents, _down(below))


def _drawing(kind: str, step: SpecStep, words: Words, parents: Sequence[int], places: Sequence[Place]) -> str:
    width = max([x for x, _ in places]) + WIDTH + MARGIN
    height = max([y for _, y in places]) + HEIGHT + MARGIN
    states = [_state(step, parents, number) for number in range(len(parents))]
    edges = [
        f'<path class="hs-edge hs-{states[number]}" d="{_edge(kind, places[parents[number]], places[number])}"/>'
        for number in range(1, len(parents))
    ]
    boxes = [_box(step, words, number, states[number], place) for number, place in enumerate(places)]
    accepted = len(step.path) - 1
    description = f"Draft tree of {counted(len(step.tree) - 1, 'token')}, {accepted} accepted"
    return (
        f'<div class="hs-scroll {kind}" tabindex="0" role="group" aria-label="Draft tree">'
        f'<svg class="hs-tree" width="{width}" height="{height}" viewBox="0 0 {width} {height}" role="img" '
        f'aria-label="{description}">{"".join(edges)}{"".join(boxes)}</svg></div>'
    )


def _across(parents: Sequence[int], below: Sequence[Sequence[int]]) -> list[Place]:
    """Places with a column for each depth and a line for each leaf."""
    depths, lines = [0] * len(parents), [0] * len(parents)
    free, waiting = 0, [0]
    while waiting:
        number = waiting.pop()
        if number:
            depths[number] = depths[parents[number]] + 1
            free += number != below[parents[number]][0]
        lines[number] = free
        waiting += below[number][::-1]
    return [(MARGIN + depth * ACROSS, MARGIN + line * DOWN) for depth, line in zip(depths, lines, strict=True)]


def _down(below: Sequence[Sequence[int]]) -> list[Place]:
    """Places with a line for each node: first children below their parents, others indented between them."""
    places = [(0, 0)] * len(below)
    waiting, line = [(0, 0)], 0
    while waiting:
        number, indent = waiting.pop()
        places[number] = (MARGIN + indent * INDENT, MARGIN + line * DOWN)
        line += 1
        children = [*below[number][:1], *below[number][:0:-1]]  # the first one is taken last
        waiting += [(child, indent + (child != children[0])) for child in children]
    return places


def _edge(kind: str, parent: Place, child: Place) -> str:
    (x0, y0), (x1, y1) = parent, child
    if kind == "hs-across":
        x0, y0, y1 = x0 + WIDTH, y0 + HEIGHT // 2, y1 + HEIGHT // 2
        middle = x1 - (x1 - x0) // 2
        return f"M{x0} {y0}C{middle} {y0} {middle} {y1} {x1} {y1}"
    start = f"M{x0 + MARGIN} {y0 + HEIGHT}"
    return f"{start}V{y1}" if x0 == x1 else f"{start}V{y1 + HEIGHT // 2}H{x1}"


def _state(step: SpecStep, parents: Sequence[int], number: int) -> str:
    """Root, accepted, the target's choice, turned down by the target, or never reached."""
    if number in (0, len(parents) - 1):
        return "chosen" if number else "root"
    if number in step.path:
        return "accepted"
    return "rejected" if parents[number] in step.path else "unreached"


def _box(step: SpecStep, words: Words, number: int, state: str, place: Place) -> str:
    x, y = place
    text = words.word(step.accepted[-1] if state == "chosen" else step.tree.tokens[number])
    source, note = "last token of the text", "target" if state == "chosen" else ""
    style = source_class("target") if state == "chosen" else ""
    if state not in ("root", "chosen"):
        node = step.nodes[number - 1] if step.nodes else None
        key = node.source if node is not None else "draft"
        source, style = source_of(key).label, source_class(key)
        chance = "" if node is None or node.probability is None else f"{node.probability:.0%}"
        note = " ".join(filter(None, [source_of(key).letter, chance]))
    return (
        f'<g class="hs-node hs-{state} {style}"><title>{one_line(text, 60)}: {source}, {state}</title>'
        f'<rect x="{x}" y="{y}" width="{WIDTH}" height="{HEIGHT}" rx="6"/>'
        f'<text class="hs-label" x="{x + 8}" y="{y + 20}">{one_line(text, 9)}</text>'
        f'<text class="hs-sign" x="{x + WIDTH - 7}" y="{y + 20}" text-anchor="end">{SIGNS.get(state, "")}</text>'
        f'<text class="hs-chance" x="{x + WIDTH}" y="{y - 3}" text-anchor="end">{note}</text></g>'
    )
