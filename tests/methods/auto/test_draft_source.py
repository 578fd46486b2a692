"""A draft with a tokenizer of its own as auto's source: what it writes, in the target's tokens, with probabilities."""

import math
from typing import Any

import pytest
import torch

from hf_specdec.common.tree import DraftTree
from hf_specdec.methods.auto.draft_source import TranslatedSource, draft_source_of
from hf_specdec.methods.auto.recycled_logits import FLOOR
from hf_specdec.methods.auto.sources import Likeliest
from hf_specdec.methods.common.node_logits import NodeLogits
from hf_specdec.methods.common.translation import Translation
from tests.helpers.tokenizers import byte_level, characters

TARGET, DRAFT = byte_level(["so the theme of them is the end"] * 9, 290), characters()
NOTHING_FOUND = Likeliest([0], (0,), (-1,), (1.0,), (0,))


class Writer:
    """A draft model that writes one text, each character with the same probability."""

    source = "draft_model"

    def __init__(self, text: str, probability: float) -> None:
        self.ids, self.probability, self.kept = DRAFT.encode(text), probability, list[int]()

    def room(self) -> int:
        return 100

    def keep(self, tree: DraftTree, accepted: list[int]) -> None:
        self.kept += accepted

    def rows(self, number: int) -> NodeLogits:
        """The logits of its character `number`."""
        size = len(DRAFT)
        rest = math.log((1.0 - self.probability) / (size - 1))
        row = torch.full((1, size), rest)
        row[0, self.ids[number]] = math.log(self.probability)
        return NodeLogits(row)


class Scores:
    """A search that has a node for every path it is asked for."""

    def __init__(self) -> None:
        self.nodes: dict[tuple[int, int], int] = {}
        self.said: dict[int, dict[int, float]] = {}

    def child(self, node: int, token: int) -> int:
        return self.nodes.setdefault((node, token), len(self.nodes) + 1)

    def score(self, node: int, entry: Any) -> None:
        self.said[node] = {token: 1.0 / (1.0 + math.exp(FLOOR - value)) for token, value in zip(*entry, strict=True)}


def source_of(prompt: str, writer: Writer) -> TranslatedSource:
    translation = Translation(TARGET, DRAFT)
    translation.begin(TARGET.encode(prompt))
    scorer: Any = writer
    source = draft_source_of(scorer, translation)
    assert isinstance(source, TranslatedSource)
    return source


def request_of(source: TranslatedSource, search: Any) -> DraftTree:
    request = source.request(search, NOTHING_FOUND)
    assert request is not None
    return request


def first(text: str) -> int:
    token: int = TARGET.encode(text)[0]
    return token


def test_a_token_has_the_probability_of_the_draft_tokens_that_write_it() -> None:
    """A space becomes ` the`, and both stay on offer; each forward is asked for one character more."""
    writer, search = Writer(" the end", 0.8), Scores()
    source = source_of("so", writer)
    source.start(first("so"))
    lengths = []
    for number in range(4):
        lengths.append(len(request_of(source, search)))
        source.read(writer.rows(number))
        assert source.tell(search)
        assert not source.tell(search), "nothing is new a second time"
    assert lengths == [lengths[0] + number for number in range(4)]
    assert len(TARGET.encode(" the")) == 1
    assert search.said[0] == pytest.approx({first(" "): 0.8, first(" the"): 0.8**4}, rel=1e-3)
    assert search.said[search.child(0, first(" "))] == pytest.approx({first("t"): 0.8}, rel=1e-3)


def test_the_text_is_translated_when_the_draft_is_next_asked() -> None:
    writer, search = Writer("the", 0.9), Scores()
    source = source_of("so", writer)
    for word in (" the", " end", " of", " it"):
        source.keep(DraftTree.chain(0), TARGET.encode(word))
    assert writer.kept == []
    source.start(0)
    request = request_of(source, search)
    text = DRAFT.decode([*source.translation.fixed, *request.tokens[1:]])
    assert text == "so the end of it"
    assert writer.kept == source.translation.fixed[-len(writer.kept) :] != []


def test_a_step_forgets_what_the_one_before_wrote() -> None:
    writer, search = Writer("the", 0.9), Scores()
    source = source_of("so ", writer)
    source.start(0)
    first = request_of(source, search)
    source.read(writer.rows(0))
    source.start(0)
    assert request_of(source, search).tokens == first.tokens
    assert not source.tell(search)
