"""A step: the walk down a tree emits what plain decoding would, stops where it stops, and survives an interrupt."""

import random
from collections.abc import Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import StoppingCriteriaList
from transformers.generation import EosTokenCriteria, MaxLengthCriteria

from hf_specdec.common.stats import SpecStats
from hf_specdec.common.tree import DraftTree, TreeBuilder
from hf_specdec.engine.step import StepRunner
from hf_specdec.engine.stopping import StopCheck
from hf_specdec.engine.verify import VerifyResult, verify_tree
from hf_specdec.forward.text_rows import TokenBuffer


def random_tree(rng: random.Random, num_nodes: int, vocab_size: int) -> DraftTree:
    builder = TreeBuilder(0)
    for _ in range(num_nodes):
        builder.add(rng.randrange(len(builder)), rng.randrange(vocab_size))
    return builder.build()


def target(text: tuple[int, ...], vocab_size: int) -> int:
    """A target model: some fixed function of the text."""
    return hash(text) % vocab_size


def follow(tree: DraftTree, vocab_size: int, stop_after: int | None = None) -> tuple[VerifyResult, list[int]]:
    """Walk with a target that sees the text along the path; also returns the nodes it was asked about."""
    wanted: list[int] = []

    def choose(node: int) -> tuple[int, bool]:
        wanted.append(node)
        text = tuple(tree.tokens[step] for step in tree.path(node))
        return target(text, vocab_size), len(wanted) == stop_after

    return verify_tree(tree, choose), wanted


def decode(root: int, vocab_size: int, num_tokens: int) -> list[int]:
    """The reference: one token after the other."""
    text = (root,)
    for _ in range(num_tokens):
        text += (target(text, vocab_size),)
    return list(text[1:])


@pytest.mark.parametrize("seed", range(50))
def test_the_tokens_are_those_of_plain_decoding(seed: int) -> None:
    tree = random_tree(random.Random(seed), num_nodes=20, vocab_size=3)
    result, wanted = follow(tree, vocab_size=3)
    assert result.tokens == decode(tree.tokens[0], 3, len(result.tokens))
    assert wanted == result.path, "the target is asked once per emitted token, in order"


@pytest.mark.parametrize("seed", range(50))
def test_the_path_is_the_longest_one_that_holds_them(seed: int) -> None:
    tree = random_tree(random.Random(seed), num_nodes=20, vocab_size=3)
    result, _ = follow(tree, vocab_size=3)
    assert result.path == tree.path(result.path[-1])
    assert [tree.tokens[node] for node in result.path[1:]] == result.tokens[:-1]
    assert tree.child(result.path[-1], result.tokens[-1]) is None, "the last token was not drafted at its place"
    assert len(result.path) == len(result.tokens) == result.num_accepted + 1


@pytest.mark.parametrize("stop_after", [1, 2, 3, 4])
def test_a_stop_ends_the_walk_even_inside_the_tree(stop_after: int) -> None:
    """The token that ends the text is the last one, and its key is not part of the cache."""
    tree = DraftTree.chain(0, decode(0, 5, 6))
    result, wanted = follow(tree, vocab_size=5, stop_after=stop_after)
    assert result.tokens == decode(0, 5, stop_after)
    assert result.path == list(range(stop_after)) == wanted


TEXT = TokenBuffer(torch.tensor([[5, 6, 7]]), room=4)


@pytest.mark.parametrize(("tokens", "length", "stops"), [([8], 9, False), ([8, 2], 9, True), ([8, 8], 5, True)])
def test_length_and_end_of_text_stop_without_a_tensor(tokens: list[int], length: int, stops: bool) -> None:
    check = StopCheck(StoppingCriteriaList([MaxLengthCriteria(length), EosTokenCriteria(torch.tensor([2, 3]))]))
    text = TokenBuffer(torch.tensor([[5, 6, 7]]), room=4)
    for token in tokens:
        text.append(token)
    assert check(text, None) is stops
    assert (check.max_length, check.eos) == (length, {2, 3})


def test_every_other_criterion_is_asked_once_whatever_the_others_say() -> None:
    wanted: list[tuple[int, Any]] = []

    def criterion(ids: torch.Tensor, scores: Any) -> bool:
        wanted.append((ids.shape[1], scores))
        return len(wanted) == 1

    check = StopCheck(StoppingCriteriaList([criterion, MaxLengthCriteria(9), criterion]))
    score = torch.zeros(1, 3)
    assert check(TEXT, [score]) is True
    assert [(length, scores[0] is score) for length, scores in wanted] == [(3, True), (3, True)]


class Interrupted(Sequence[DraftTree]):
    """Trees of so many sequences, then Ctrl-C."""

    def __init__(self, trees: list[DraftTree], at: int) -> None:
        self.trees, self.at = trees, at

    def __len__(self) -> int:
        return len(self.trees)

    def __getitem__(self, place: Any) -> Any:
        return self.trees[place]

    def __iter__(self) -> Iterator[DraftTree]:
        yield from self.trees[: self.at]
        raise KeyboardInterrupt


@pytest.mark.parametrize("at", [0, 1, 2])
def test_an_interrupt_between_two_sequences_commits_the_results_so_far(at: int) -> None:
    """That of the last one too: then there is none that was interrupted."""
    committed: list[list[list[int]]] = []
    sequences = [
        SimpleNamespace(finished=False, visited=[0], verify=lambda tree, on_token: VerifyResult([7, 8], [0, 1]))
        for _ in range(2)
    ]
    batch: Any = SimpleNamespace(sequences=sequences, target=SimpleNamespace(commit=committed.append))
    steps = StepRunner(SpecStats(method="plain", tier="tree"), budget=None, observer=None)
    trees = Interrupted([DraftTree.chain(5, [7])] * 2, at)
    with pytest.raises(KeyboardInterrupt):
        steps._verify(batch, trees)
    (paths,) = committed
    assert paths == [[0, 1]] * at + [[0]] * (2 - at)
