"""A draft tree as SVG, from left to right: what was drafted, what was accepted, where the target turned off."""

from collections.abc import Sequence

from hf_specdec.errors import counted
from hf_specdec.tools.demo.draw.markup import one_line, percent
from hf_specdec.tools.demo.draw.sources import source_class, source_of
from hf_specdec.tools.demo.record import Node, Step

WIDTH, HEIGHT = 90, 30  # of a node's box
ACROSS, DOWN = 118, 44  # from node to node
MARGIN = 14


def draw_tree(step: Step) -> str:
    """The verified tree of one step, and the target's own choice at the end of the accepted path."""
    nodes = list(step.nodes)
    last = max(number for number, node in enumerate(nodes) if node.is_accepted)
    nodes.append(Node(last, step.tokens[-1], "target"))
    places = _places(nodes)
    width = max(across for across, _ in places) + WIDTH + MARGIN
    height = max(down for _, down in places) + HEIGHT + MARGIN
    edges = [_edge(places, nodes, number) for number in range(1, len(nodes))]
    boxes = [_box(places[number], node, _state(nodes, number)) for number, node in enumerate(nodes)]
    return (
        f'<div class="hs-scroll" tabindex="0" role="group" aria-label="Draft tree, scrolls sideways">'
        f'<svg class="hs-tree" width="{width}" height="{height}" viewBox="0 0 {width} {height}" role="img" '
        f'aria-label="{_description(step)}">{"".join(edges)}{"".join(boxes)}</svg></div>'
    )


def _places(nodes: Sequence[Node]) -> list[tuple[int, int]]:
    """Left upper corner of each node: columns by depth, a line for each leaf, parents in line with a first child.

    The accepted child, else the target's choice, else the first one comes first: so the text goes straight on.
    """
    below: list[list[int]] = [[] for _ in nodes]
    depths = [0] * len(nodes)
    for number, node in enumerate(nodes[1:], 1):
        below[node.parent].append(number)
        depths[number] = depths[node.parent] + 1
    for children in below:
        children.sort(key=lambda number: (not nodes[number].is_accepted, nodes[number].source != "target", number))
    lines = [0] * len(nodes)
    free, waiting = 0, [0]
    while waiting:
        number = waiting.pop()
        siblings = below[nodes[number].parent] if number else [0]
        if number != siblings[0]:
            free += 1
        lines[number] = free
        waiting += below[number][::-1]
    return [(MARGIN + depths[n] * ACROSS, MARGIN + lines[n] * DOWN) for n in range(len(nodes))]


def _state(nodes: Sequence[Node], number: int) -> str:
    """Root, accepted, the target's choice, turned down by the target, or never reached."""
    node = nodes[number]
    if node.parent < 0:
        return "root"
    if node.source == "target":
        return "chosen"
    if node.is_accepted:
        return "accepted"
    return "rejected" if nodes[node.parent].is_accepted else "unreached"


def _edge(places: Sequence[tuple[int, int]], nodes: Sequence[Node], number: int) -> str:
    (x0, y0), (x1, y1) = places[nodes[number].parent], places[number]
    x0, y0, y1 = x0 + WIDTH, y0 + HEIGHT // 2, y1 + HEIGHT // 2
    middle = x1 - (x1 - x0) // 2
    path = f"M{x0} {y0}C{middle} {y0} {middle} {y1} {x1} {y1}"
    return f'<path class="hs-edge hs-{_state(nodes, number)}" d="{path}"/>'


def _box(place: tuple[int, int], node: Node, state: str) -> str:
    x, y = place
    sign = {"accepted": "\u2713", "rejected": "\u2717", "chosen": "\u25b8"}.get(state, "")
    label, said = one_line(node.text, 9), one_line(node.text, 60)
    origin = source_of(node.source).label if node.source else "last token of the text"
    title = f"{said}: {origin}, {state}"
    chance = "" if node.probability is None else percent(node.probability)
    note = " ".join(filter(None, [source_of(node.source).letter, chance])) if state != "chosen" else "target"
    return (
        f'<g class="hs-node hs-{state} {source_class(node.source) if node.source else ""}"><title>{title}</title>'
        f'<rect x="{x}" y="{y}" width="{WIDTH}" height="{HEIGHT}" rx="6"/>'
        f'<text class="hs-label" x="{x + 8}" y="{y + 20}">{label}</text>'
        f'<text class="hs-sign" x="{x + WIDTH - 7}" y="{y + 20}" text-anchor="end">{sign}</text>'
        f'<text class="hs-chance" x="{x + WIDTH}" y="{y - 3}" text-anchor="end">{note}</text></g>'
    )


def _description(step: Step) -> str:
    drafted, accepted = counted(len(step.nodes) - 1, "token"), len(step.tokens) - 1
    return f"Draft tree of {drafted}, {accepted} accepted, then the target chose {one_line(step.tokens[-1], 30)}"
