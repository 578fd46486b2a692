"""The walk down a tree emits what plain decoding would, and accepts as much of the tree as holds it."""

import random

import pytest

from hf_specdec.common.tree import DraftTree, TreeBuilder
from hf_specdec.engine.verify import VerifyResult, verify_tree


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
