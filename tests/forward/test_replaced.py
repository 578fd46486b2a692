"""Replaced forwards act in the thread that enters a block, wrap what was there, and go with the last block."""

import copy
import pickle
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch

from hf_specdec.common.replaced import Replacement, replaced, this_thread


class Doubled(Replacement):
    """Doubles what a module computes, where states are kept."""

    __slots__ = ()

    def __call__(self, *args: Any) -> Any:
        return self.original(*args) if this_thread.states is None else 2 * self.original(*args)


class Other(Doubled):
    __slots__ = ()


@pytest.fixture
def layer() -> Any:
    return torch.nn.Identity()


def of(layer: Any, value: float = 1.0) -> float:
    return float(layer(torch.tensor(value)))


def in_another_thread(compute: Callable[[], Any]) -> Any:
    results: list[Any] = []
    thread = threading.Thread(target=lambda: results.append(compute()))
    thread.start()
    thread.join()
    return results[0]


def test_they_act_in_the_thread_of_the_block_until_it_ends(layer: Any) -> None:
    with replaced([Doubled(layer)], states=[]):
        assert of(layer) == 2.0
        assert in_another_thread(lambda: of(layer)) == 1.0
        with replaced([Other(layer)]):  # a module has one replacement
            assert of(layer) == 2.0
        with replaced(states=None):
            assert of(layer) == 1.0
        assert of(layer) == 2.0
    assert (of(layer), this_thread.states, "forward" in vars(layer)) == (1.0, None, False)


def test_blocks_of_two_threads_share_a_replacement_until_the_last_ends(layer: Any) -> None:
    first, second = threading.Event(), threading.Event()

    def other() -> float:
        with replaced([Doubled(layer)], states=[]):
            first.set()
            second.wait(30)
            return of(layer)

    with replaced([Doubled(layer)], states=[]):
        results: list[float] = []
        thread = threading.Thread(target=lambda: results.append(other()))
        thread.start()
        first.wait(30)
    assert of(layer) == 1.0
    second.set()
    thread.join()
    assert (results, "forward" in vars(layer)) == ([2.0], False)


@pytest.mark.parametrize("wraps", [False, True])
def test_a_forward_that_was_there_is_wrapped_or_kept_and_is_there_again(layer: Any, wraps: bool) -> None:
    layer.forward = ours = lambda value: value + 10
    with replaced([Doubled(layer)], wraps=wraps, states=[]):
        assert of(layer) == (22.0 if wraps else 11.0)
    assert layer.forward is ours


def test_what_an_interrupt_leaves_does_nothing_and_goes_with_the_next_block(layer: Any) -> None:
    block = replaced([Doubled(layer)], states=[])
    block.__enter__()
    vars(this_thread).clear()  # as in another thread: the block never ends
    for same in (layer, pickle.loads(pickle.dumps(layer)), copy.deepcopy(layer)):
        assert of(same) == 1.0
    twin = copy.deepcopy(layer)
    with replaced([Doubled(twin)], states=[]):
        assert of(twin) == 2.0
    assert "forward" not in vars(twin)
