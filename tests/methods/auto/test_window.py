"""Lookahead's window next to auto: there while it pays, tried now and then, its n-grams the target's own."""

import math
from collections.abc import Sequence

import pytest
import torch

from hf_specdec import AutoSpecConfig, ConfigError, SpecMemory
from hf_specdec.common.tree import DraftTree
from hf_specdec.methods.auto.adaptive_weights import INITIAL_WINDOW_GAIN, AdaptiveWeights
from hf_specdec.methods.auto.drafter import AutoDrafter
from hf_specdec.methods.auto.recycled_logits import TOKEN_BITS
from hf_specdec.methods.auto.window import RETRY, TRIAL, AutoWindow
from hf_specdec.methods.common.drafter import DraftCost
from hf_specdec.methods.common.node_logits import NodeLogits
from tests.helpers.drafts import Table, drafted_by, learned, random_table
from tests.methods.auto.test_auto import texts_of

VOCAB = 40
TABLE = random_table(seed=4, vocab_size=VOCAB, scale=3.0, window=1)
CHEAP = DraftCost(of_node=0.002)


def following(table: Table, tokens: Sequence[int]) -> int:
    return int(table(tuple(tokens)).argmax())


def decode(
    drafter: AutoDrafter, tokens: list[int], *, steps: int, table: Table = TABLE, worth: DraftCost = CHEAP
) -> list[DraftTree]:
    """Verify drafts with a table, adding to `tokens`; returns the trees."""
    trees = []
    for _ in range(steps):
        tree = drafted_by(drafter, 16, cost=worth)
        trees.append(tree)
        node, accepted = 0, [following(table, tokens)]
        while (child := tree.child(node, accepted[-1])) is not None:
            node = child
            accepted.append(following(table, [*tokens, *accepted]))
        learned(drafter, tree, torch.stack([table(text) for text in texts_of(tree, tokens)]), accepted)
        tokens += accepted
    return trees


def drafter_of(
    memory: SpecMemory | None = None, prompt: Sequence[int] = (1, 2, 3), **config: int | bool
) -> AutoDrafter:
    drafter = AutoDrafter(AutoSpecConfig.parse(config), memory or SpecMemory())
    drafter.begin(prompt)
    return drafter


def presence(window: AutoWindow, price: float, steps: int) -> list[bool]:
    return [window.extra_tokens([1, 2, 3], price) is not None for _ in range(steps)]


def test_a_window_is_there_where_it_adds_as_much_as_its_columns_cost() -> None:
    window = AutoWindow(5, 4, AdaptiveWeights())
    assert window.num_columns == 14
    assert presence(window, INITIAL_WINDOW_GAIN / 14, 3) == [True] * 3
    assert presence(window, 1.01 * INITIAL_WINDOW_GAIN / 14, 3) == [False] * 3


def test_unlikely_nodes_are_no_reason_for_a_window() -> None:
    """They and the window would make the forward a wide one, and a second token costs much more than the third."""
    text = [1, 2, 3, 1, 4, 6, 1, 5, 7, 1]
    costs = [DraftCost(of_node=1e-3, of_draft=jump) for jump in (0.0, 0.9)]
    trees = [drafted_by(drafter_of(prompt=text), 16, cost=cost) for cost in costs]
    assert [len(tree) > 1 for tree in trees] == [True, True]
    assert [tree.extra is not None for tree in trees] == [True, False]


def test_where_it_added_nothing_it_goes_and_is_tried_again_for_a_while() -> None:
    adaptive_weights = AdaptiveWeights()
    window = AutoWindow(5, 4, adaptive_weights)
    price = 0.1 * INITIAL_WINDOW_GAIN / 14
    while window.extra_tokens([1, 2, 3], price) is not None:
        adaptive_weights.window_gained(0.0)
    there = presence(window, price, 3 * (RETRY + TRIAL))
    assert sum(there) == 3 * TRIAL
    first = there.index(True)
    assert first == pytest.approx(RETRY, abs=2)
    assert all(there[first : first + TRIAL])


@pytest.mark.parametrize("price", [0.0, INITIAL_WINDOW_GAIN / 13, math.inf])
def test_nobody_tries_it_where_costs_are_unknown_or_no_window_could_pay(price: float) -> None:
    adaptive_weights = AdaptiveWeights()
    adaptive_weights.window_gain = 0.0
    assert not any(presence(AutoWindow(5, 4, adaptive_weights), price, 3 * RETRY))


def test_it_keeps_what_the_target_says_behind_its_columns() -> None:
    """The target is a table of the last token, so whatever a column holds, the table knows what follows it."""
    window = AutoWindow(4, 3, AdaptiveWeights())
    text, grown = [1, 2, 3], []
    for _ in range(6):
        extra = window.extra_tokens(text, 0.001)
        assert extra is not None
        grown.append(len(extra))
        tree = DraftTree.chain(text[-1], [9, 8]).with_extra(extra)
        window.observe(tree, NodeLogits(torch.stack([TABLE(seen) for seen in texts_of(tree, text)])))
        text.append(following(TABLE, text))
    assert grown == [3, 7, 7, 7, 7, 7]
    keys = window.found.export()["keys"].tolist()
    assert {key >> TOKEN_BITS > 0 for key in keys} == {True, False}  # of one token and of two
    for key in keys:
        entry = window.found.get(key)
        assert entry is not None
        assert entry[0][0] == following(TABLE, [key % (1 << TOKEN_BITS) - 1])


def test_a_step_without_a_window_leaves_it_as_it_is() -> None:
    window = AutoWindow(4, 3, AdaptiveWeights())
    window.observe(DraftTree.chain(3), NodeLogits(torch.zeros(1, VOCAB)))
    assert window.extra_tokens([1, 2, 3], 0.001) is not None
    window.observe(DraftTree.chain(3), NodeLogits(torch.zeros(1, VOCAB)))
    extra = window.extra_tokens([1, 2, 3, 4], 0.001)
    assert extra is not None
    assert len(extra) == 3
    assert not len(window.found)


def test_what_it_finds_is_drafted_and_credited() -> None:
    """The text runs through tokens that it never had; only the window has looked behind some of the prompt's."""
    ring: Table = lambda text: torch.eye(VOCAB)[(text[-1] + 1) % VOCAB] * 20.0  # noqa: E731
    memories = [SpecMemory(), SpecMemory()]
    lengths = []
    for memory, size in zip(memories, (6, 0), strict=True):
        tokens = [35, 29, 23, 17, 11, 5, 1]
        trees = decode(drafter_of(memory, tokens, window_size=size), tokens, steps=20, table=ring)
        assert any(tree.extra is not None for tree in trees) == bool(size)
        lengths.append(len(tokens))
    assert lengths[0] > lengths[1]
    assert memories[0].greedy.window_gain > INITIAL_WINDOW_GAIN
    assert memories[1].greedy.window_gain == INITIAL_WINDOW_GAIN


def test_where_it_finds_nothing_that_comes_true_it_goes() -> None:
    """Every text goes on by its length, so what follows a column says nothing of what follows the text."""
    random: Table = lambda text: torch.eye(VOCAB)[(len(text) ** 2 * 7 + text[0]) % VOCAB] * 20.0  # noqa: E731
    memory = SpecMemory()
    trees = decode(drafter_of(memory), [1, 2, 3], steps=200, table=random, worth=DraftCost(of_node=0.003))
    there = [tree.extra is not None for tree in trees]
    assert there[0]
    assert not any(there[-50:])
    assert memory.greedy.window_gain < INITIAL_WINDOW_GAIN


@pytest.mark.parametrize("config", [{"window_size": 0}, {"num_nodes": 8}, {"use_recycled": False}])
def test_configurations_without_a_window(config: dict[str, int]) -> None:
    drafter = drafter_of(**config)
    assert drafter.max_extra_tokens == 0
    assert drafted_by(drafter, 8, cost=CHEAP).extra is None


def test_a_target_that_takes_no_trees_gets_no_window() -> None:
    drafter = AutoDrafter(AutoSpecConfig(), takes_trees=False)
    drafter.begin([1, 2, 3])
    assert drafted_by(drafter, 8, cost=CHEAP).extra is None


@pytest.mark.parametrize(("field", "value"), [("window_size", 1), ("window_size", False), ("ngram_size", 1)])
def test_sizes_that_make_no_window_are_refused(field: str, value: int) -> None:
    with pytest.raises(ConfigError, match=field):
        AutoSpecConfig(**{field: value})  # type: ignore[arg-type]


def test_what_it_added_is_saved(tmp_path: object) -> None:
    memory = SpecMemory()
    memory.sampled.window_gain = 0.375
    memory.save(f"{tmp_path}/memory")
    loaded = SpecMemory.load(f"{tmp_path}/memory")
    assert (loaded.sampled.window_gain, loaded.greedy.window_gain) == (0.375, INITIAL_WINDOW_GAIN)
