"""Messages between the processes of one model, exchanged by threads over a channel that needs no network."""

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch

from hf_specdec.distributed.rank_sync import RankSync, digest
from hf_specdec.errors import RankError


class Table:
    """Where all processes put their values."""

    def __init__(self, size: int) -> None:
        self.size, self.values = size, [b""] * size
        self.barrier = threading.Barrier(size, timeout=20)


class ThreadSync(RankSync):
    """Processes that are threads."""

    def __init__(self, table: Table, rank: int) -> None:
        self.table, self.rank, self.device = table, rank, torch.device("cpu")
        self.is_leader, self.is_open = rank == 0, True
        self.num_collectives = 0

    def _all_gather(self, content: bytes, size: int) -> list[bytes]:
        self.num_collectives += 1
        self.table.values[self.rank] = content.ljust(size, b"\0")
        self.table.barrier.wait()
        values = list(self.table.values)
        self.table.barrier.wait()
        return values


def together(*roles: Callable[[ThreadSync], Any]) -> list[Any]:
    """What each role returns or raises, the first one leading; no one waits for ever."""
    table, results = Table(len(roles)), [None] * len(roles)

    def play(rank: int) -> None:
        try:
            results[rank] = roles[rank](ThreadSync(table, rank))
        except Exception as error:
            results[rank] = error

    threads = [threading.Thread(target=play, args=(rank,)) for rank in range(len(roles))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
        assert not thread.is_alive()
    return results


@pytest.mark.parametrize(("length", "expected"), [(10_000, 1), (40_000, 2)])
def test_the_first_one_s_message_takes_one_collective_unless_it_is_long(length: int, expected: int) -> None:
    def role(sync: ThreadSync) -> tuple[int, int]:
        message = sync.exchange("x" * (length if sync.is_leader else 3))
        return len(message), sync.num_collectives

    assert together(role, role, role) == [(length, expected)] * 3


@pytest.mark.parametrize("rank", [0, 1])
def test_an_error_of_one_process_is_raised_by_all_at_their_next_message(rank: int) -> None:
    """Its cause is named everywhere."""

    def role(sync: ThreadSync) -> None:
        try:
            sync.exchange()
            if sync.rank == rank:
                raise KeyError("streamer")
            sync.exchange()
        except Exception as error:
            sync.abandon(error)
            raise

    errors = together(role, role, role)
    assert isinstance(errors[rank], KeyError)
    for other in {0, 1, 2} - {rank}:
        assert isinstance(errors[other], RankError)
        assert f"rank {rank}: KeyError: 'streamer'" in str(errors[other])


def test_after_the_end_and_in_a_forward_no_one_is_told() -> None:
    def role(sync: ThreadSync) -> int:
        with sync.computing():
            sync.abandon(ValueError("out of memory"))
        sync.close()
        sync.abandon(ValueError("too late"))
        return sync.num_collectives

    assert together(role, role) == [1, 1]


def test_calls_that_differ_are_named_in_every_process() -> None:
    def role(sync: ThreadSync) -> None:
        digests = {"input_ids": digest(torch.tensor([1, int(sync.is_leader)])), "max_length": 4}
        sync.check(digests if sync.is_leader else {**digests, "streamer": 3, "input_ids": 0})

    for error in together(role, role, role):
        assert isinstance(error, RankError)
        assert "but input_ids and streamer differ" in str(error)


def test_digests_tell_values_apart() -> None:
    ids = torch.tensor([[1, 2]])
    assert digest(ids) == digest(ids.clone())
    assert len({digest(value) for value in (ids, ids.T, ids + 1, "a", 1, None)}) == 6
    assert digest(torch.rand(2, 3)) == digest(torch.rand(2, 3)), "floats may differ in the last place"
