"""Draw the concept pages' figures from real runs of the embedded target: `python docs/draw_figures.py`.

Every figure shows a step that `spec_observer` saw, so what is drawn is what the loop did.
"""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from transformers import AutoTokenizer

import hf_specdec
from hf_specdec import DraftTree, SpecStep
from hf_specdec.methods.registry import sources

IMAGES = Path(__file__).parent / "images"
ACCEPTED, REJECTED, ROOT, PLAIN = "#bcdcff", "#ffd9c2", "#d9d9d9", "#eeeeee"
MOST_LETTERS = 6  # of a word in a box of a row
PROMPT = """class Stack:
    def push(self, item):
        self.items.append(item)

    def pop(self):
        return self.items.pop()


class Queue:
    def push(self, item):
"""


def main() -> None:
    """Draw all figures."""
    plt.rcParams.update({"svg.fonttype": "none", "font.family": "DejaVu Sans", "font.size": 9, "svg.hashsalt": "docs"})
    path = hf_specdec.embedded.path("target")
    run = Run(
        hf_specdec.AutoModelForCausalLM.from_pretrained(path, precision="fp32"), AutoTokenizer.from_pretrained(path)
    )
    for name, draw in FIGURES.items():
        figure = draw(run)
        figure.savefig(IMAGES / f"{name}.svg", bbox_inches="tight", facecolor="white", metadata={"Date": None})
        plt.close(figure)


class Run:
    """Steps of the embedded target on the prompt of the figures."""

    def __init__(self, model: Any, tokenizer: Any) -> None:
        self.model, self.tokenizer = model, tokenizer
        self.ids: list[int] = tokenizer(PROMPT).input_ids

    def steps(self, method: str, **config: Any) -> list[tuple[list[int], SpecStep]]:
        """The text before each step, and the step."""
        seen: list[SpecStep] = []
        output = self.model.generate(
            torch.tensor([self.ids]),
            max_new_tokens=48,
            do_sample=False,
            spec_method=method,
            spec_config=config,
            spec_observer=seen.append,
        )
        text, length, found = output[0].tolist(), len(self.ids) + 1, []
        for step in seen:
            found.append((text[:length], step))
            length += len(step.accepted)
        return found

    def words(self, tokens: list[int] | tuple[int, ...]) -> list[str]:
        """Each token as it is shown: line ends and spaces made visible."""
        pieces = [self.tokenizer.decode([token]) for token in tokens]
        return [piece.replace("\n", "\u21b5").replace(" ", "\u00b7")[:12] for piece in pieces]


def ngram_match(run: Run) -> Figure:
    """The last tokens of the text, where they stood before, and what is drafted from there."""
    text, step = max(run.steps("prompt_lookup", draft_len_per_match=None), key=lambda seen: len(seen[1].accepted))
    drafted = step.tree.tokens[1:]
    size, place = next((n, found) for n in (3, 2, 1) if (found := _place(text, drafted, n)) is not None)
    earlier = [*text, *drafted][place - size : place + len(drafted)]  # a draft may go on into itself
    figure, axes = plt.subplots(figsize=(9, 1.9))
    axes.axis("off")
    colors = [ROOT] * size + [PLAIN] * len(drafted)
    _row(axes, 1.0, "earlier in the text", run.words(earlier), colors)
    accepted = len(step.accepted) - 1
    shown = [ACCEPTED] * accepted + [REJECTED] * (len(drafted) - accepted)
    _row(axes, 0.0, "end of the text, draft", run.words([*text[-size:], *drafted]), [ROOT] * size + shown)
    axes.set(xlim=(-3.6, len(earlier)), ylim=(-0.6, 1.6))
    return figure


def _place(text: list[int], drafted: Sequence[int], size: int) -> int | None:
    """Index after the last earlier place of the text's last `size` tokens that goes on with what was drafted."""
    whole, end = [*text, *drafted], text[-size:]
    places = [
        place
        for place in range(size, len(text))
        if text[place - size : place] == end and whole[place : place + len(drafted)] == [*drafted]
    ]
    return places[-1] if places else None


def draft_tree(run: Run) -> Figure:
    """A draft tree with its accepted path, and which node sees which."""
    steps = run.steps("auto", num_nodes=8, pool="request")
    _, step = max(steps, key=lambda seen: len(seen[1].accepted) * (not seen[1].tree.is_chain))
    figure, (left, right) = plt.subplots(1, 2, figsize=(9, 3.2), width_ratios=(2.4, 1))
    _tree(left, run, step)
    count = len(step.tree)
    right.imshow(step.tree.visible()[:count, :count].numpy(), cmap="Blues", vmin=0, vmax=1.4)
    right.set(xlabel="node that is seen", ylabel="node", title="tree mask", xticks=range(count), yticks=range(count))
    return figure


def auto_sources(run: Run) -> Figure:
    """What each of auto's sources said of the drafted nodes of one step."""
    steps = [step for _, step in run.steps("auto", num_nodes=6) if any(len(node.votes) > 1 for node in step.nodes)]
    step = max(steps, key=lambda seen: sum(len(node.votes) for node in seen.nodes))
    figure, axes = plt.subplots(figsize=(9, 2.8))
    names = [name for name in sources() if any(vote.source == name for node in step.nodes for vote in node.votes)]
    for place, name in enumerate(names):
        weights = [sum(vote.weight for vote in node.votes if vote.source == name) for node in step.nodes]
        width = 0.8 / len(names)
        axes.bar([node + place * width for node in range(len(weights))], weights, width, label=sources()[name].label)
    words = run.words(step.tree.tokens[1:])
    labels = [
        f"{word}\n{node.probability:.2f}" for word, node in zip(words, step.nodes, strict=True) if node.probability
    ]
    axes.set(ylabel="score added", xticks=[node + 0.4 for node in range(len(labels))], xticklabels=labels)
    axes.legend(frameon=False)
    return figure


def lookahead_window(run: Run) -> Figure:
    """The window level by level, and the n-grams that it has found for the text's last token."""
    width = 6
    steps = run.steps("lookahead", window_size=width, ngram_size=4, verification_set_size=4)
    tree = max((step.tree for _, step in steps[8:] if step.tree.extra), key=lambda tree: len(tree.children(0)))
    tokens = (tree.tokens[0], *tree.extra.tokens)
    window = [tokens[start : start + width] for start in range(0, len(tokens), width)]
    figure, axes = plt.subplots(figsize=(9, 2.6))
    axes.axis("off")
    for level, part in enumerate(window):
        colors = [ROOT if level == 0 and column == 0 else PLAIN for column in range(width)]
        _row(axes, -float(level), f"level {level}", run.words(part), colors)
    for number, first in enumerate(tree.children(0)[:3]):
        branch = [0, first]
        while children := tree.children(branch[-1]):
            branch.append(children[0])
        words = run.words([tree.tokens[node] for node in branch])
        _row(axes, -float(number), "", words, [ROOT] + [ACCEPTED] * (len(branch) - 1), start=9)
    axes.text(10, 0.75, "n-grams found for the last token", ha="center")
    axes.set(xlim=(-2.4, 13.5), ylim=(-len(window) + 0.4, 1.2))
    return figure


def cost_model(run: Run) -> Figure:
    """How fast a method is, by tokens per forward and by what a forward of its width costs."""
    figure, axes = plt.subplots(figsize=(6.4, 3))
    lengths = torch.linspace(1, 5, 50)
    for price, style in ((1.0, "-"), (1.2, "--"), (1.6, "-."), (2.4, ":")):
        axes.plot(lengths, lengths / price, style, color="black", label=f"a forward costs {price:.1f} of plain's")
    axes.axhline(1, color="#c0392b", linewidth=0.8)
    axes.set(xlabel="tokens per forward", ylabel="speed over plain", xlim=(1, 5), ylim=(0, 5))
    axes.legend(frameon=False)
    return figure


def _row(axes: Axes, height: float, title: str, words: list[str], colors: list[str], start: float = 0) -> None:
    """A line of boxes with a title in front."""
    axes.text(start - 0.8, height, title, ha="right", va="center")
    for place, (word, color) in enumerate(zip(words, colors, strict=True)):
        box = {"boxstyle": "round,pad=0.25", "fc": color, "ec": "#888888"}
        shown = word if len(word) <= MOST_LETTERS else word[: MOST_LETTERS - 1] + "…"
        axes.text(start + place, height, shown, ha="center", va="center", bbox=box, family="DejaVu Sans Mono", size=7)


def _tree(axes: Axes, run: Run, step: SpecStep) -> None:
    """Nodes by depth from left to right, accepted ones in blue."""
    heights = _heights(step.tree)
    words = run.words(step.tree.tokens)
    for node, parent in enumerate(step.tree.parents):
        if parent >= 0:
            ends = [step.tree.depths[parent], step.tree.depths[node]], [heights[parent], heights[node]]
            axes.plot(*ends, color="#888888", linewidth=2.2 if node in step.path else 0.8, zorder=0)
    for node, word in enumerate(words):
        color = ROOT if node == 0 else ACCEPTED if node in step.path else REJECTED
        share = step.nodes[node - 1].probability if node and step.nodes else None
        label = f"{node} {word}" + (f"\n{share:.2f}" if share is not None else "")
        box = {"boxstyle": "round,pad=0.25", "fc": color, "ec": "#888888"}
        axes.text(step.tree.depths[node], heights[node], label, ha="center", va="center", bbox=box, size=7)
    axes.set(xlim=(-0.6, max(step.tree.depths) + 0.6), ylim=(min(heights) - 0.8, max(heights) + 0.8))
    axes.set_title("draft tree with probabilities; blue is accepted")
    axes.axis("off")


def _heights(tree: DraftTree) -> list[float]:
    """A height for each node: leaves one under the other, parents amid their children."""
    heights, next_leaf = [0.0] * len(tree), 0.0

    def place(node: int) -> float:
        nonlocal next_leaf
        children = tree.children(node)
        if not children:
            next_leaf -= 1.0
            heights[node] = next_leaf
        else:
            heights[node] = sum(place(child) for child in children) / len(children)
        return heights[node]

    place(0)
    return heights


FIGURES: dict[str, Callable[[Run], Figure]] = {
    "ngram-match": ngram_match,
    "draft-tree": draft_tree,
    "auto-sources": auto_sources,
    "lookahead-window": lookahead_window,
    "cost-model": cost_model,
}

if __name__ == "__main__":
    main()
