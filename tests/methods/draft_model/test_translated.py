"""A draft with a tokenizer of its own is weighed by what its tokens are worth in the target's."""

from collections.abc import Sequence

import torch

from hf_specdec.common.tree import DraftTree
from hf_specdec.engine.verify import verify_tree
from hf_specdec.methods.common.drafter import DraftRequest, DraftResult
from hf_specdec.methods.common.translation import Translation
from hf_specdec.methods.draft_model.candidates import AcceptanceCounts
from hf_specdec.methods.draft_model.config import DraftModelConfig
from hf_specdec.methods.draft_model.translated import TranslatedDrafter
from tests.helpers.drafts import TableScorer
from tests.helpers.tokenizers import byte_level, characters

TEXT = 12 * "the little cat sat on the mat while another cat was eating the rest of it. "
PROMPT_LENGTH = 40
LETTERS, WORDS = characters(), byte_level([TEXT], 330)


def knows_the_text(ids: tuple[int, ...]) -> torch.Tensor:
    """Logits of a draft that is sure of how the text goes on."""
    rest = TEXT.removeprefix(WORDS.decode(ids))
    return torch.nn.functional.one_hot(torch.tensor(WORDS.encode(rest[:30])[0]), len(WORDS)) * 20.0


class WordScorer(TableScorer):
    """Follows the tokens that are fixed, of which a step may bring none."""

    def room(self) -> int:
        return 1 << 30

    def keep(self, tree: DraftTree, accepted: Sequence[int]) -> None:
        self.text += accepted
        self.requests = []


def decode(relative_cost: float, num_tokens: int = 300) -> tuple[int, int, AcceptanceCounts]:
    """Steps of the text's characters with drafts of words, what was drafted, and the acceptances counted."""
    scorer, counts = WordScorer(knows_the_text, vocab_size=len(WORDS), relative_cost=relative_cost), AcceptanceCounts()
    text = LETTERS.encode(TEXT)
    translation = Translation(LETTERS, WORDS)
    translation.begin(text[:PROMPT_LENGTH])
    drafter = TranslatedDrafter(DraftModelConfig(), scorer, translation, counts=counts)
    drafter.begin(text[:PROMPT_LENGTH])
    length, num_steps, num_drafted = PROMPT_LENGTH, 0, 0
    while length < num_tokens:
        tree = drafter.draft_for(DraftRequest(24))
        after = iter(text[length:])
        result = verify_tree(tree, lambda _, after=after: (next(after), False))  # type: ignore[misc]
        drafter.learn_from(DraftResult(tree, tuple(result.tokens)))
        length, num_steps, num_drafted = length + len(result.tokens), num_steps + 1, num_drafted + tree.num_draft_tokens
    return num_steps, num_drafted, counts


def test_a_word_is_worth_its_letters() -> None:
    """A forward that takes more than the time of a target's is worth a word of several of its tokens."""
    num_steps, num_drafted, _ = decode(relative_cost=1.2)
    assert num_steps < 150
    assert num_drafted > 150


def test_a_token_that_the_next_letter_would_join_is_counted_as_accepted() -> None:
    _, _, counts = decode(relative_cost=0.1)
    assert counts.mean(0) > 0.9
