"""The auto drafter: best nodes first, chains where trees do not work, a draft model where it helps, and learning."""

import math
from collections.abc import Sequence
from functools import partial
from typing import Any

import pytest
import torch

from hf_specdec import AutoSpecConfig, DraftTree, SpecMemory, TreeBuilder
from hf_specdec.methods.auto.drafter import RETRIED, AutoDrafter
from hf_specdec.methods.common.drafter import DraftCost
from tests.helpers.drafts import TableScorer, drafted_by, learned, random_table
from tests.native.recycled import get, key_of

VOCAB = 12
TABLE = random_table(seed=1, vocab_size=VOCAB, scale=3.0)


def following(tokens: Sequence[int]) -> int:
    return int(TABLE(tuple(tokens)).argmax())


def text_of(count: int, start: Sequence[int] = (1, 2)) -> list[int]:
    """What a model that is a table decodes greedily, some noise in between so that it does not only repeat."""
    tokens = list(start)
    while len(tokens) < count:
        tokens.append(following(tokens) if len(tokens) % 9 else (7 * len(tokens)) % VOCAB)
    return tokens


def drafter_of(memory: SpecMemory | None = None, *, config: dict[str, Any] | None = None, **how: Any) -> AutoDrafter:
    return AutoDrafter(AutoSpecConfig(**(config or {})), memory, **how)


def texts_of(tree: DraftTree, tokens: Sequence[int]) -> list[tuple[int, ...]]:
    """What each column of the forward sees, by positions."""
    visible, columns = tree.visible(), range(tree.num_columns)
    seen = [sorted((place for place in columns if row[place]), key=tree.column_depths.__getitem__) for row in visible]
    return [(*tokens[:-1], *[tree.column_tokens[place] for place in places]) for places in seen]


def decode(drafter: AutoDrafter, *, steps: int, budget: int = 16, prompt: Sequence[int] = (1, 2)) -> list[DraftTree]:
    """Verify drafts with the table; returns the trees."""
    tokens, trees = list(prompt), []
    drafter.begin(tokens)
    for _ in range(steps):
        tree = drafted_by(drafter, budget)
        trees.append(tree)
        node, accepted = 0, [following(tokens)]
        while (child := tree.child(node, accepted[-1])) is not None:
            node = child
            accepted.append(following([*tokens, *accepted]))
        logits = torch.stack([TABLE(text) for text in texts_of(tree, tokens)]) if drafter.needs_logits else None
        learned(drafter, tree, logits, accepted)
        tokens += accepted
    return trees


@pytest.fixture
def memory() -> SpecMemory:
    """A memory of some texts of the table."""
    memory = SpecMemory(2_000, 2_000)
    for start in range(4):
        drafter = drafter_of(memory)
        decode(drafter, steps=20, prompt=(start, start + 1))
        drafter.end()
    return memory


def grown(memory: SpecMemory | None, budget: int = 16, tokens: Sequence[int] = (), **how: Any) -> DraftTree:
    drafter = drafter_of(memory, **how)
    drafter.begin(list(tokens) or text_of(30))
    return drafted_by(drafter, budget)


def same(tree: DraftTree, other: DraftTree) -> bool:
    return (tree.tokens, tree.parents, tree.probabilities) == (other.tokens, other.parents, other.probabilities)


def test_nodes_come_in_the_order_of_their_probabilities_behind_their_parents(memory: SpecMemory) -> None:
    tree = grown(memory, tokens=text_of(31))
    assert len(tree) == 17
    assert not tree.is_chain
    assert tree.probabilities is not None
    assert list(tree.probabilities) == sorted(tree.probabilities, reverse=True)
    for node in range(1, len(tree)):
        assert tree.parents[node] < node
        assert 0.0 < tree.probabilities[node] <= tree.probabilities[tree.parents[node]] <= 1.0


@pytest.mark.parametrize("budget", [0, 1, 3, 9, 16])
def test_a_smaller_budget_takes_the_likeliest_of_the_same_nodes(memory: SpecMemory, budget: int) -> None:
    whole, part = grown(memory), grown(memory, budget)
    assert len(part) == budget + 1
    assert whole.tokens[: budget + 1] == part.tokens
    assert whole.parents[: budget + 1] == part.parents


def test_the_configuration_bounds_the_budget(memory: SpecMemory) -> None:
    assert len(grown(memory, config={"num_nodes": 5})) == 6
    assert len(grown(memory, config={"max_nodes": 4})) == 5


def test_a_target_that_takes_no_trees_gets_the_likeliest_chain(memory: SpecMemory) -> None:
    tree, chain = grown(memory), grown(memory, takes_trees=False)
    assert chain.is_chain
    assert len(chain) > 3
    assert chain.probabilities is not None
    assert list(chain.probabilities) == sorted(chain.probabilities, reverse=True)
    assert chain.tokens[1] == tree.tokens[1]


def test_nodes_that_cannot_be_worth_their_time_are_left_out(memory: SpecMemory) -> None:
    drafter = drafter_of(memory)
    drafter.begin(text_of(31))
    everything = drafted_by(drafter, 64).probabilities
    some = drafted_by(drafter, 64, cost=DraftCost(of_node=0.2)).probabilities
    assert everything is not None
    assert some is not None
    assert list(some) == [probability for probability in everything if probability >= 0.2]
    assert 1 < len(some) < len(everything)


@pytest.mark.parametrize("worth", [1.0, math.inf])
def test_it_rests_where_nothing_can_be_worth_its_time(memory: SpecMemory, worth: float) -> None:
    scorer = TableScorer(TABLE, vocab_size=VOCAB)
    drafter = drafter_of(memory, scorer=scorer)
    drafter.begin(text_of(30))
    assert drafter.needs_logits
    tree = drafted_by(drafter, 16, cost=DraftCost(of_node=worth, of_forward=worth))
    assert drafter.is_paused
    assert not drafter.needs_logits
    assert len(tree) == 1
    assert scorer.requests == []
    learned(drafter, tree, None, [3])
    assert drafted_by(drafter, 16).tokens[0] == 3


def test_it_comes_to_draft_what_is_accepted() -> None:
    """The same table again and again: later steps accept more than earlier ones, also without a memory of texts."""
    trees = decode(drafter_of(SpecMemory(1, 10_000)), steps=60)
    drafted = [sum((tree.probabilities or (0.0,))[1:2]) for tree in trees]
    assert sum(drafted[-20:]) > sum(drafted[:20])


def test_logits_of_rejected_nodes_are_kept_under_their_own_tokens() -> None:
    memory = SpecMemory(100, 1_000)
    drafter = drafter_of(memory)
    drafter.begin([1, 2, 3])
    builder = TreeBuilder(3)
    builder.add(builder.add(0, 4), 6)
    builder.add(0, 5)
    tree = builder.build()
    assert tree.tokens == (3, 4, 6, 5)
    logits = torch.full((4, VOCAB), -20.0)
    for node, best in enumerate((7, 8, 10, 9)):
        logits[node, best] = 0.0
    learned(drafter, tree, logits, [7])
    keys = {(1, 2, 3): 7, (2, 3, 4): 8, (2, 3, 5): 9, (3, 4, 6): 10, (6,): 10, (3, 5): 9}
    for key, best in keys.items():
        entry = get(memory.recycled, key_of(key))
        assert entry is not None
        assert entry[0][0] == best


def test_a_draft_model_s_tokens_join_the_tree() -> None:
    scorer = TableScorer(TABLE, vocab_size=VOCAB)
    tokens = text_of(12)
    alone = grown(SpecMemory(), tokens=tokens)
    joined = grown(SpecMemory(), tokens=tokens, scorer=scorer)
    assert scorer.requests
    best = following(tokens)
    node = joined.child(0, best)
    assert node is not None
    assert joined.probabilities is not None
    assert joined.probabilities[node] == max(joined.probabilities[1:])
    assert alone.probabilities is not None
    assert sum(joined.probabilities) > 1.5 * sum(alone.probabilities)
    deeper = joined.child(node, following([*tokens, best]))
    assert deeper is not None


def test_a_draft_model_that_takes_chains_is_asked_for_chains(memory: SpecMemory) -> None:
    scorer = TableScorer(lambda text: TABLE(text) / 4.0, vocab_size=VOCAB, takes_trees=False)
    drafter = drafter_of(memory, scorer=scorer)
    drafter.begin(text_of(31))
    assert not drafted_by(drafter, 16).is_chain
    assert scorer.requests
    assert all(request.is_chain for request in scorer.requests)


def asked_in(drafter: AutoDrafter, scorer: TableScorer, tokens: Sequence[int], **fields: Any) -> list[bool]:
    """Whether the draft model was asked in each step of a text, one token a step."""
    requests = []
    drafter.begin(tokens[:2])
    for token in tokens[2:]:
        tree = drafted_by(drafter, 16, **fields)
        requests.append(bool(scorer.requests))
        learned(drafter, tree, None, [token])
    return requests


@pytest.mark.parametrize("cost", [0.5, 1.0])
def test_a_draft_model_that_adds_nothing_is_asked_seldom(cost: float) -> None:
    """One that knows nothing is asked now and then, to notice a change, and the more it costs the more seldom."""
    scorer = TableScorer(lambda text: torch.zeros(VOCAB), vocab_size=VOCAB, relative_cost=cost)
    requests = asked_in(drafter_of(SpecMemory(), scorer=scorer), scorer, text_of(420))
    assert requests[0]
    assert sum(requests[-300:]) * cost == pytest.approx(300 * RETRIED, abs=1.5)


def test_a_draft_model_is_asked_no_deeper_than_one_forward_beyond_what_was_tried() -> None:
    drafter = drafter_of(SpecMemory(), scorer=(scorer := TableScorer(TABLE, vocab_size=VOCAB, relative_cost=0.1)))
    tokens, depths = text_of(20), []
    drafter.begin(tokens[:2])
    for token in tokens[2:]:
        tree = drafted_by(drafter, 16)
        depths.append(len(scorer.requests))
        learned(drafter, tree, None, [token])
    assert depths[:3] == [1, 2, 3]
    assert max(depths) > 3


@pytest.mark.parametrize(("num_steps", "is_asked"), [(200.0, True), (4.0, False)])
def test_a_text_is_read_where_the_steps_to_come_gain_what_that_takes(num_steps: float, is_asked: bool) -> None:
    """A prompt of 1,000 tokens that takes a draft model half as long as ten steps of the target."""
    scorer = TableScorer(TABLE, vocab_size=VOCAB, relative_cost=0.5)
    scorer.num_unread = 1_000
    drafter = drafter_of(SpecMemory(), scorer=scorer)
    cost = DraftCost(of_reading=0.01, num_steps=num_steps)
    assert asked_in(drafter, scorer, text_of(12), cost=cost)[0] is is_asked


def priced(jump: float, count: int) -> float:
    return jump * (count > 0) + 0.02 * count


def test_a_draft_that_cannot_pay_is_no_gain_of_the_draft_model() -> None:
    """A second column costs as much as twenty tokens: what the draft model adds is never verified."""
    gains = {}
    for jump in (0.0, 20.0):
        scorer = TableScorer(TABLE, vocab_size=VOCAB, relative_cost=0.3)
        drafter = drafter_of(memory := SpecMemory(), scorer=scorer, config={"draft_len": 1})
        asked_in(drafter, scorer, text_of(60), cost=DraftCost(of_node=0.02, of_nodes=partial(priced, jump)))
        gains[jump] = memory.greedy.gains[0]
    assert gains[0.0] > 0.2
    assert gains[20.0] < 0.2, "so that it is not asked any more"


def test_only_the_end_of_a_text_goes_into_the_memory_and_once() -> None:
    memory = SpecMemory()
    drafter = drafter_of(memory)
    decode(drafter, steps=5)
    assert len(memory.pool) == 0
    drafter.end()
    tokens = len(memory.pool)
    drafter.end()
    assert len(memory.pool) == tokens > 5


def test_without_a_memory_nothing_outlives_the_text() -> None:
    first, second = drafter_of(), drafter_of()
    decode(first, steps=10)
    first.end()
    assert all(map(same, decode(second, steps=3), decode(drafter_of(), steps=3)))
    assert len(first.memory.pool) == 0
