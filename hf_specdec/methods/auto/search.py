"""The tree of one step: nodes that the target most likely accepts, found best first, and what is learned from them.

Nodes are numbered as they are first drafted; the root is 0. The compiled core searches. Knows neither clocks nor
models.
"""

from collections.abc import Sequence

from hf_specdec.common.observer import SourceVote
from hf_specdec.common.tree import ANY_DEPTH, DraftTree
from hf_specdec.kernels import native
from hf_specdec.methods.auto.recycled_logits import Entry
from hf_specdec.methods.auto.sources import Likeliest, NoiseRow, Sources
from hf_specdec.methods.common.ngram.index import NgramIndex


class Search:
    """The search of one step, in the compiled core.

    Args:
        sources: know what follows a context.
        index: the text; its last token is the root.
        takes_trees: whether siblings are verified; where not, a chain is grown.
        max_depth: nodes one under the other, the root apart, at most.
        noise: of the draws after the nodes of depth 0, 1, ... as far as it is known.

    Attributes:
        token, parent, child, probability: of a node's number the token that it holds, the node above it, -1 for the
            root, the node below it that holds a token, -1 where none was drafted, and the probability that the target
            accepts it and all before it, as last drafted.
        value: of a list of nodes, the root first, the expected accepted tokens by what is known now.
    """

    def __init__(
        self,
        sources: Sources,
        index: NgramIndex,
        *,
        takes_trees: bool = True,
        max_depth: int = ANY_DEPTH,
        noise: Sequence[NoiseRow] = (),
    ) -> None:
        assert native.core is not None
        self._sources = sources
        young, old, recycled, learned = sources.arrays
        texts, common = (index.arrays, young, old), index.common.arrays
        self._search = native.core.Search(*texts, recycled, learned, common, takes_trees, max_depth, tuple(noise))
        self.token, self.parent = self._search.token, self._search.parent
        self.child, self.probability = self._search.child, self._search.probability
        self.value = self._search.value

    def likeliest(self, budget: int, floor: float) -> Likeliest:
        """Find at most `budget` nodes below the root, none of a probability below `floor`."""
        return Likeliest(*self._search.likeliest(budget, floor))

    def votes(self, node: int, token: int) -> tuple[SourceVote, ...]:
        """Get what each source that knows `token` said of it after `node`, the one that added most first."""
        said, weights = self._search.said(node)
        return self._sources.votes(token, [(place, (tokens, evidence)) for place, tokens, evidence in said], weights)

    def score(self, node: int, entry: Entry) -> None:
        """Take what the draft model says of `node`."""
        self._search.score(node, list(entry[0]), list(entry[1]))

    def follow(self, tree: DraftTree, accepted: Sequence[int]) -> None:
        """Learn every token that the text went on with, down the verified `tree`."""
        self._search.follow(tree.tokens, tree.parents, accepted)
