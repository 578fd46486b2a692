"""A draft model as a drafter sees it: logits of the nodes of a growing tree, without caches or devices.

A model answers it in the engine (`forward/networks`), a table in tests. A drafter writes its rounds as a
generator that yields the trees it wants scored; so the requests of several rows can be answered by one forward.

    class MyDrafter(RoundDrafter):
        def grow(self, request):                      # Generator[DraftTree, NodeLogits, DraftTree]
            tree = DraftTree.chain(root)
            rows = yield tree                         # the root's; rows.logits is (1, vocab_size)
            tree = DraftTree.chain(root, rows.best())
            rows = yield tree                         # the new node's
            return tree

A forward takes time of every row. Where drafters say what a request gains, the rows decide together whether it is made;
if not, `NoForward` is raised at the `yield`, and the round ends with what it has.
"""

from abc import abstractmethod
from collections.abc import Generator, Iterable, Sequence
from itertools import zip_longest
from typing import Protocol

from hf_specdec.common.tree import DraftTree
from hf_specdec.methods.common.drafter import BaseDrafter, DraftRequest
from hf_specdec.methods.common.node_logits import NodeLogits

DraftRound = Generator[DraftTree, NodeLogits, DraftTree]


class NoForward(Exception):
    """The forward that a round asked for is not worth its time."""


class DraftScorer(Protocol):
    """A draft model with the text of one row.

    Attributes:
        vocab_size (`int`): width of the logits.
        takes_trees (`bool`): whether it scores siblings; a chain is always possible.
        relative_cost (`float`): cost of the next request over a forward of the target, roughly.
        max_draft_len (`int`): levels of a tree that it can draft.
        source (`str`): what `spec_observer` is told of where its drafts come from.
        num_unread (`int`): tokens of the text before the last that the next request has to read first.
    """

    vocab_size: int
    takes_trees: bool
    max_draft_len: int
    source: str

    @property
    def relative_cost(self) -> float:
        """See above."""

    @property
    def num_unread(self) -> int:
        """See above."""

    def begin(self, prompt_ids: Sequence[int]) -> None:
        """Start a text."""

    def score(self, tree: DraftTree) -> NodeLogits:
        """Raw fp32 logits of the nodes that this round has not scored yet, in their order.

        The root is the last token of the text. Each tree of a round begins with the nodes of the one before it.
        """

    def room(self) -> int:
        """Number of tokens that may be scored below the text's last one."""

    def keep(self, tree: DraftTree, accepted: Sequence[int]) -> None:
        """End the round: the text goes on with `accepted`; what was computed for its tokens is kept.

        `tree` is what was verified. It may lack nodes that were scored, so nodes are found by their tokens.
        """


def cost_ratio(weights: tuple[int, int], layers: tuple[int, int]) -> float:
    """Estimates what a forward of a draft costs over one of the target: between the ratios of weights and of kernels.

    A large model's time goes with its weights, a small one's with the number of its kernels. What surrounds the layers
    (embeddings, masks, the output head, for a draft head also the states of the target) takes the kernels of one layer
    more: of the embedded models, 447 operations with six layers, 191 with two, and 120 in a head of one.

    Args:
        weights: that a forward of the draft and one of the target multiply with.
        layers: of the draft and of the target.
    """
    return (weights[0] / max(weights[1], 1) + (layers[0] + 1) / (layers[1] + 1)) / 2.0


class RoundDrafter(BaseDrafter):
    """A drafter that asks a draft model. Subclasses implement `grow`; `draft_for` follows from it.

    Attributes:
        forward_gain (`float | None`): expected tokens that the answer to the last request gains; `None` where it is
            wanted in any case.
        forward_cost (`float`): tokens that come about otherwise in the time of a forward of the draft.

    Args:
        scorer: the draft model, with the text of this drafter's row; `None` for one that does without, whose rounds
            then ask for nothing.
    """

    forward_gain: float | None = None
    forward_cost: float = 0.0

    def __init__(self, scorer: DraftScorer | None) -> None:
        self.scorer = scorer

    @abstractmethod
    def grow(self, request: DraftRequest) -> DraftRound:
        """Run one round: yield the trees to be scored, get their rows, return the tree to be verified.

        Nothing is scored where the request's budget is 0.
        """

    def draft_for(self, request: DraftRequest) -> DraftTree:
        """Run a round of this row alone."""
        round_ = self.grow(request)
        try:
            wanted = next(round_)
            while True:
                assert self.scorer is not None
                if is_worth_a_forward([self], [self]):
                    wanted = round_.send(self.scorer.score(wanted))
                else:
                    wanted = round_.throw(NoForward())
        except StopIteration as finished:
            tree: DraftTree = finished.value
            return tree


def is_worth_a_forward(asking: Iterable[RoundDrafter], live: Iterable[RoundDrafter]) -> bool:
    """True if one forward gains the rows that ask for it more than all live rows lose by its time."""
    gains = [drafter.forward_gain for drafter in asking]
    if any(gain is None for gain in gains):
        return True
    return sum(gain for gain in gains if gain is not None) >= sum(drafter.forward_cost for drafter in live)


def at_common_width(trees: Sequence[DraftTree], min_probabilities: Sequence[float]) -> list[DraftTree]:
    """The trees without what is not worth its time, each row's first branch in front.

    A node more a row takes time of every row, so of the nodes at one place in their trees the sum of the
    probabilities has to reach that of the rows' bounds. Trees that do not say how probable their nodes are stay.

    Args:
        min_probabilities: of each row, the probability of acceptance that is worth a drafted node's time; 0.0 where the
            row needs none.
    """
    estimates = [tree.probabilities[1:] for tree in trees if tree.probabilities is not None]
    bound = sum(min_probabilities)
    best, best_gain, gain = 0, 0.0, 0.0
    for width, column in enumerate(zip_longest(*estimates, fillvalue=0.0), 1):
        gain += sum(column) - bound
        if gain >= best_gain:
            best, best_gain = width, gain
    return [
        tree if tree.probabilities is None else tree.truncated(max_nodes=best).first_branch_first() for tree in trees
    ]
