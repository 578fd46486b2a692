"""The protocol between the processes of one model, run by threads over a channel that needs no network."""

import threading
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from hf_specdec.common.tree import DraftTree, ExtraTokens, TreeBuilder
from hf_specdec.distributed.rank_channel import RankChannel
from hf_specdec.distributed.rank_sync import RankSync, _Follower, _Leader, digest
from hf_specdec.errors import RankError


class Table:
    """Where all processes put their values."""

    def __init__(self, size: int) -> None:
        self.size, self.values = size, [b""] * size
        self.barrier = threading.Barrier(size, timeout=20)


class ThreadChannel(RankChannel):
    """A channel between threads."""

    def __init__(self, table: Table, rank: int) -> None:
        self.table, self.rank, self.intact = table, rank, True
        self.num_collectives = 0

    def _all_gather(self, content: bytes, size: int) -> list[bytes]:
        self.num_collectives += 1
        self.table.values[self.rank] = content.ljust(size, b"\0")
        self.table.barrier.wait()
        values = list(self.table.values)
        self.table.barrier.wait()
        return values


def together(*roles: Callable[[RankSync], Any]) -> list[Any]:
    """What each role returns or raises, the first one leading; no one waits for ever."""
    table, results = Table(len(roles)), [None] * len(roles)

    def play(rank: int) -> None:
        kind = _Leader if rank == 0 else _Follower
        try:
            results[rank] = roles[rank](kind(ThreadChannel(table, rank), torch.device("cpu")))
        except Exception as error:
            results[rank] = error

    threads = [threading.Thread(target=play, args=(rank,)) for rank in range(len(roles))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
        assert not thread.is_alive()
    return results


def fork(root: int) -> DraftTree:
    builder = TreeBuilder(root)
    builder.add(0, 4), builder.add(0, 5)
    extra = ExtraTokens((7, 8), (1, 2), torch.tensor([[True, True, False], [True, False, True]]))
    return builder.build().with_extra(extra)


def test_trees_and_decisions_are_the_first_ones() -> None:
    """One message a step brings the decisions of the last step and the trees of the next."""

    def role(sync: RankSync) -> list[Any]:
        seen: list[Any] = []
        for step in range(3):
            (tree,) = sync.trees(lambda step=step: [fork(step)], None)
            assert torch.equal(tree.visible(), fork(step).visible())
            number = 10 * step if sync.is_leader else 99
            seen += [tree, sync.decide(lambda number=number: number), sync.decide(lambda: 7, is_watched=False)]
        sync.finish()
        return seen

    leader, follower = together(role, role)
    assert leader == follower
    assert leader[1::3] == [0, 10, 20]


@pytest.mark.parametrize(("num_nodes", "expected"), [(64, 1), (100_000, 2)])
def test_a_message_takes_one_collective_unless_it_is_long(num_nodes: int, expected: int) -> None:
    chains = [DraftTree.chain(1, range(num_nodes)) for _ in range(16 if num_nodes == 64 else 1)]

    def role(sync: RankSync) -> tuple[int, bool]:
        trees = sync.trees(lambda: chains, None)
        count = sync.channel.num_collectives  # type: ignore[attr-defined]
        assert sync.channel.gather("x" * (40_000 if sync.is_leader else 3))[1:] == ["xxx"] * 2
        sync.finish()
        return count, trees[-1].tokens == chains[-1].tokens

    assert together(role, role, role) == [(expected, True)] * 3


def test_what_children_were_drawn_from_stays_with_the_leader() -> None:
    drawn = replace(DraftTree.chain(1, [2]), drafted_from={0: torch.ones(3) / 3}, probabilities=(1.0, 0.5))

    def role(sync: RankSync) -> DraftTree:
        (tree,) = sync.trees(lambda: [drawn], None)
        sync.finish()
        return tree

    leader, follower = together(role, role)
    assert leader is drawn
    assert (follower.tokens, follower.drafted_from, follower.probabilities) == ((1, 2), None, None)


def test_a_draft_models_forwards_are_followed_until_the_trees_come() -> None:
    class Draft:
        def __init__(self, sync: RankSync) -> None:
            self.sync, self.scored = sync, []

        def score(self, trees: Any) -> None:
            if self.sync.is_leader:
                self.sync.score(trees)
            self.scored.append(trees[0].tokens)

    def role(sync: RankSync) -> Any:
        draft = Draft(sync)

        def propose() -> list[DraftTree]:
            for token in (3, 4):
                draft.score([DraftTree.chain(token)])
            return [DraftTree.chain(5)]

        trees = sync.trees(propose, draft)
        sync.finish()
        return draft.scored, trees[0].tokens

    assert together(role, role) == [([(3,), (4,)], (5,))] * 2


def test_an_error_of_the_leader_is_raised_by_everyone() -> None:
    def role(sync: RankSync) -> None:
        try:
            sync.trees(lambda: [fork(1)], None)
            sync.decide(lambda: [][3] if sync.is_leader else 1)
            sync.finish()
        except Exception as error:
            sync.abandon(error)
            raise

    leader, follower = together(role, role)
    assert isinstance(leader, IndexError)
    assert isinstance(follower, RankError)
    assert "rank 0: IndexError: list index out of range" in str(follower)


def test_an_error_of_a_follower_ends_all_at_the_next_message() -> None:
    """Its cause is named everywhere, and the follower's own error is the cause there."""

    def role(sync: RankSync) -> None:
        sync.attempt(lambda: None if sync.is_leader else {}["streamer"])
        sync.trees(lambda: [fork(1)], None)
        raise AssertionError("not reached")

    leader, follower = together(role, role)
    assert isinstance(leader, RankError)
    assert "rank 1: KeyError: 'streamer'" in str(leader) == str(follower)
    assert isinstance(follower.__cause__, KeyError)


def test_a_follower_that_cannot_confirm_a_decision_says_so() -> None:
    def confirm(token: int) -> None:
        raise RankError(f"{token} cannot be")

    def role(sync: RankSync) -> None:
        sync.trees(lambda: [fork(1)], None)
        sync.decide(lambda: 5 if sync.is_leader else 6, confirm=confirm)
        sync.finish()

    assert all("rank 1: RankError: 5 cannot be" in str(error) for error in together(role, role))


def test_calls_that_differ_are_named_in_every_process() -> None:
    def role(sync: RankSync) -> None:
        mine = {"input_ids": digest(torch.tensor([1, int(sync.is_leader)])), "max_length": 4}
        sync.check(lambda: mine if sync.is_leader else {**mine, "streamer": 3, "input_ids": 0})

    for error in together(role, role, role):
        assert isinstance(error, RankError)
        assert "but input_ids and streamer differ" in str(error)


@pytest.mark.parametrize("num_decisions", [0, 2])
def test_processes_that_lose_step_are_an_error(num_decisions: int) -> None:
    def role(sync: RankSync) -> None:
        sync.trees(lambda: [fork(1)], None)
        for _ in range(1 if sync.is_leader else num_decisions):
            sync.decide(lambda: 1)
        sync.trees(lambda: [fork(2)], None)
        raise AssertionError("not reached")

    errors = together(role, lambda sync: _losing(role, sync))
    assert isinstance(errors[1], RankError)
    assert "rank 0" in str(errors[1])


def _losing(role: Callable[[RankSync], Any], sync: RankSync) -> None:
    """A process that fails leaves; the others must not wait for it here."""
    try:
        role(sync)
    finally:
        sync.channel.table.barrier.abort()  # type: ignore[attr-defined]


def test_digests_tell_values_apart() -> None:
    ids = torch.tensor([[1, 2]])
    assert digest(ids) == digest(ids.clone())
    assert len({digest(value) for value in (ids, ids.T, ids + 1, "a", 1, None)}) == 6
    assert digest(torch.rand(2, 3)) == digest(torch.rand(2, 3)), "floats may differ in the last place"
