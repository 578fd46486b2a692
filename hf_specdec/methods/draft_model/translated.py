"""Drafts of a model with a tokenizer of its own: grown in its vocabulary, verified in the target's.

drafter = TranslatedDrafter(DraftModelConfig(draft_len=4), scorer, Translation(tokenizer, assistant_tokenizer))
"""

import dataclasses
from collections.abc import Callable, Sequence

from hf_specdec.common.stats import DraftedNode
from hf_specdec.common.tree import DraftTree
from hf_specdec.methods.common.draft_scorer import DraftRound, DraftScorer, at_common_width
from hf_specdec.methods.common.drafter import TOKEN_COST, DraftRequest, DraftResult
from hf_specdec.methods.common.translation import Translation
from hf_specdec.methods.draft_model.candidates import AcceptanceCounts, Growth
from hf_specdec.methods.draft_model.config import DraftModelConfig
from hf_specdec.methods.draft_model.drafter import DraftModelDrafter


class TranslatedDrafter(DraftModelDrafter):
    """A `DraftModelDrafter` whose text is the draft's, and whose chains are the target's.

    Args:
        scorer: the draft, with the fixed tokens of `translation` as its text.
        translation: this row's text in both vocabularies; it has begun.
        counts, token_cost: see `DraftModelDrafter`.
    """

    def __init__(
        self,
        config: DraftModelConfig,
        scorer: DraftScorer,
        translation: Translation,
        *,
        counts: AcceptanceCounts | None = None,
        token_cost: Callable[[int, int], float] = lambda num_rows, num_nodes: TOKEN_COST,
    ) -> None:
        super().__init__(config, scorer, counts=counts, token_cost=token_cost)
        self.translation = translation
        self._root = 0  # the target's

    def begin(self, prompt_ids: Sequence[int]) -> None:
        """Start a text of the target's tokens."""
        super().begin(self.translation.fixed)
        self._root = prompt_ids[-1]

    def grow(self, request: DraftRequest) -> DraftRound:
        """Run the draft's round after the text's tail, then translate its chain into the target's vocabulary."""
        text = self.translation
        self._text = [*text.fixed, *text.tail]
        if len(text.tail) + self._len > self.scorer.room():
            request = dataclasses.replace(request, budget=0)
        tree = yield from super().grow(request)
        [tree] = at_common_width([tree], [self.min_probability])
        return DraftTree.chain(self._root, text.drafted(tree.first_branch()))

    def _growth(self) -> Growth:
        return Growth(self.translation.fixed[-1], self.translation.tail)

    def learn_from(self, result: DraftResult) -> None:
        """Count what was accepted, and let the draft follow the text."""
        self._root = result.accepted[-1]
        fixed = self.translation.extend(list(result.accepted))
        if self._round is not None:
            self._count(self._observations(self._round), self._round, result)
            self._round = None
        self.scorer.keep(result.tree, fixed)

    def describe(self, tree: DraftTree) -> tuple[DraftedNode, ...]:
        """The draft model drafts everything; what the target's tokens are worth is not known one by one."""
        return tuple(DraftedNode(self.scorer.source) for _ in tree.tokens[1:])

    @property
    def tokens_a_node(self) -> float:
        """See `DraftModelDrafter`: by the lengths of the whole text in both vocabularies."""
        return self.translation.tokens_a_token

    def _observations(self, growth: Growth) -> list[tuple[int, float, bool]]:
        """As `observations`, by characters: of a token within which the new text ends, the rest is not known."""
        seen: list[tuple[int, float, bool]] = []
        text, children, is_accepted = self.translation.new_text, growth.root.children, True
        while is_accepted and children:
            [child] = children.values()
            drafted = self.translation.draft.text_after(self._text, child.path())
            is_accepted, children = text.startswith(drafted), child.children
            if is_accepted or not drafted.startswith(text):
                seen.append((child.rank, child.confidence, is_accepted))
        return seen

    @property
    def _num_levels(self) -> int:
        """The text's room is in the target's tokens, one of which may take several of the draft's."""
        return self._len
