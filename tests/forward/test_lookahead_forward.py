"""In the engine's forward, every node and window token gets the logits that its own text would give it."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch

import hf_specdec
from hf_specdec.common.tree import DraftTree
from hf_specdec.methods.common.drafter import DraftResult
from hf_specdec.methods.lookahead.config import LookaheadConfig
from hf_specdec.methods.lookahead.drafter import LookaheadDrafter
from tests.helpers.cover import wide_but
from tests.helpers.support import PROMPT, plain
from tests.helpers.zoo import FAMILIES, build

pytestmark = pytest.mark.each_value_in_file
LOOKAHEAD = LookaheadConfig(window_size=4, ngram_size=4, verification_set_size=4)
TOLERANCE = 1e-4


class Recorder(LookaheadDrafter):
    """Keeps each step's text, tree and logits, whole rows of them."""

    num_top_logits = None

    def __init__(self) -> None:
        super().__init__(LOOKAHEAD)
        self.text: list[int] = []
        self.steps: list[tuple[list[int], DraftTree, torch.Tensor]] = []

    def begin(self, prompt_ids: Sequence[int]) -> None:
        self.text = list(prompt_ids)
        super().begin(prompt_ids)

    def learn_from(self, result: DraftResult) -> None:
        assert result.logits is not None
        self.steps.append((self.text.copy(), result.tree, result.logits.logits.clone()))
        self.text += result.accepted
        super().learn_from(result)


def text_of_column(text: list[int], tree: DraftTree, column: int) -> list[int]:
    """The text up to and including a column of the forward: what stands before the root, then what the column sees."""
    if column < len(tree):
        return text[:-1] + [tree.tokens[node] for node in tree.path(column)]
    assert tree.extra is not None
    ours = column - len(tree)
    tokens, depths = (tree.tokens[0], *tree.extra.tokens), (0, *tree.extra.depths)
    seen = [place for place in range(len(tokens)) if tree.extra.visible[ours, place]]
    return text[:-1] + [tokens[place] for place in sorted(seen, key=lambda place: depths[place])]


@pytest.mark.at_most(1)
@pytest.mark.parametrize("name", wide_but(["gpt2", "gemma3"], ["llama", "gpt2", "mistral", "gemma3"]))
def test_window_and_candidates_are_computed_as_texts_of_their_own(name: str) -> None:
    model: Any = hf_specdec.enable(build(FAMILIES[name]))
    recorder = Recorder()
    arguments = {"max_new_tokens": 24, "do_sample": False}
    out = model.generate(PROMPT, spec_method=lambda: recorder, **arguments)
    assert torch.equal(out, plain(model, PROMPT, **arguments))
    levels = set()
    for text, tree, logits in recorder.steps:
        assert len(logits) == tree.num_columns
        levels.add(0 if tree.extra is None else 1 + len(tree.extra) // LOOKAHEAD.window_size)
        for column in range(tree.num_columns):
            ids = torch.tensor([text_of_column(text, tree, column)])
            with torch.no_grad():
                expected = model(input_ids=ids).logits[0, -1]
            torch.testing.assert_close(logits[column], expected, atol=TOLERANCE, rtol=TOLERANCE)
    assert {1, 2, 3} <= levels, "the window was computed at every stage of filling"
    assert max(len(tree) for _, tree, _ in recorder.steps) > 1 + LOOKAHEAD.ngram_size, "candidates branched"
