"""Trees under a constraint: what it forbids is left out, what it forces is drafted; each token is asked about once."""

from collections.abc import Sequence

import pytest
import torch

from hf_specdec.common.tree import DraftTree, ExtraTokens, TreeBuilder
from hf_specdec.engine.sampling.constraint import constrained

TEXT = [1, 2]


class Words:
    """Allows the texts of a list after `TEXT`, and counts what it is asked about."""

    def __init__(self, *words: Sequence[int]) -> None:
        self.words, self.path = [tuple(word) for word in words], ()
        self.requests: list[tuple[int, ...]] = []

    def follow(self, text: Sequence[int]) -> None:
        assert list(text) == TEXT
        self.path = ()

    def descend(self, path: Sequence[int]) -> bool:
        self.requests.append(tuple(path))
        is_allowed = any(word[: len(path)] == tuple(path) for word in self.words)
        self.path = tuple(path) if is_allowed else self.path
        return is_allowed

    def forced(self) -> list[int]:
        run: list[int] = []
        while True:
            here = (*self.path, *run)
            following = {word[len(here)] for word in self.words if word[: len(here)] == here and len(word) > len(here)}
            if len(following) != 1:
                return run
            run += following

    def mask_nodes(self, scores: torch.Tensor, tree: DraftTree, text: Sequence[int]) -> torch.Tensor:
        raise NotImplementedError


def tree_of(*branches: Sequence[int], probabilities: Sequence[float] | None = None) -> DraftTree:
    builder = TreeBuilder(TEXT[-1])
    for branch in branches:
        builder.add_path(0, branch)
    tree = builder.build()
    return tree if probabilities is None else tree.with_probabilities(tuple(probabilities))


def branches_of(tree: DraftTree) -> set[tuple[int, ...]]:
    leaves = [node for node in range(len(tree)) if not tree.children(node)]
    return {tuple(tree.tokens[place] for place in tree.path(leaf)[1:]) for leaf in leaves}


def test_a_forced_run_comes_before_the_drafter_s_tokens_and_below_its_leaves() -> None:
    words = Words([3, 4, 5, 6, 7], [3, 4, 8, 6, 7], [3, 4, 9])
    tree = constrained(tree_of([3, 4, 5], [3, 4, 8]), words, TEXT)
    assert branches_of(tree) == {(3, 4, 5, 6, 7), (3, 4, 8, 6, 7)}
    assert tree.first_branch()[:2] == [3, 4]


def test_probabilities_of_what_is_left_out_go_to_its_siblings() -> None:
    proposed = tree_of([3, 4], [5], [7], probabilities=[1.0, 0.4, 0.2, 0.4, 0.1])
    tree = constrained(proposed, Words([3, 4], [3, 6], [7, 2]), TEXT)
    result = dict(zip(map(tuple, map(tree.path, range(len(tree)))), tree.probabilities, strict=True))
    by_tokens = {tuple(tree.tokens[node] for node in path[1:]): chance for path, chance in result.items()}
    assert by_tokens == pytest.approx({(): 1.0, (3,): 0.4 / 0.6, (3, 4): 0.2 / 0.6, (7,): 0.1 / 0.6, (7, 2): 0.1 / 0.6})
    assert list(tree.probabilities) == sorted(tree.probabilities, reverse=True)


def test_extra_tokens_stay_and_each_token_is_asked_about_at_most_once() -> None:
    extra = ExtraTokens((9,), (1,), torch.ones((1, 2), dtype=torch.bool))
    words = Words([3, 4], [3, 5], [7, 8, 9], [7, 2])
    tree = constrained(tree_of([3, 4], [3, 6, 1], [7, 8], [2]).with_extra(extra), words, TEXT)
    assert tree.extra is extra
    assert branches_of(tree) == {(3, 4), (7, 8, 9)}
    assert len(words.requests) == len(set(words.requests))
