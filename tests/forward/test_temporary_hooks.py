"""Hooks go with their block, whatever interrupts it, and those that an interrupt leaves are harmless."""

import copy
import pickle
from typing import Any

import pytest
import torch

from hf_specdec.common import temporary_hooks as module_of_hooks
from hf_specdec.common.temporary_hooks import temporary_hooks


def doubled(module: Any, args: tuple[Any, ...], kwargs: Any, output: torch.Tensor) -> torch.Tensor:
    return output * 2


def one_more(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return (args[0] + 1,), kwargs


def num_hooks(layer: torch.nn.Module) -> int:
    kept = ("_forward_pre_hooks", "_forward_pre_hooks_with_kwargs", "_forward_hooks", "_forward_hooks_with_kwargs")
    return sum(len(getattr(layer, name)) for name in kept)


@pytest.fixture
def layer() -> Any:
    return torch.nn.Identity()


def test_they_act_within_the_block_and_beside_others(layer: Any) -> None:
    layer.register_forward_hook(lambda module, args, output: output + 100)
    with temporary_hooks(before=[(layer, one_more)], after=[(layer, doubled)]):
        assert float(layer(torch.tensor(1.0))) == 204.0
        with temporary_hooks(after=[(layer, doubled)]):
            assert float(layer(torch.tensor(1.0))) == 408.0
        assert float(layer(torch.tensor(1.0))) == 204.0
    assert float(layer(torch.tensor(1.0))) == 101.0
    assert num_hooks(layer) == 1


@pytest.mark.parametrize("num_sweeps", [0, 1])
def test_what_an_interrupt_leaves_does_nothing_and_goes_with_the_next_block(
    layer: Any, monkeypatch: pytest.MonkeyPatch, num_sweeps: int
) -> None:
    """It comes before or while hooks are removed."""
    real, calls = module_of_hooks._sweep, list[Any]()

    def interrupted(modules: Any) -> None:
        calls.append(modules)
        if len(calls) == 2:
            real(modules[:num_sweeps])
            raise KeyboardInterrupt

    other = torch.nn.Identity()
    with monkeypatch.context() as patched:
        patched.setattr(module_of_hooks, "_sweep", interrupted)
        with pytest.raises(KeyboardInterrupt), temporary_hooks(before=[(other, one_more)], after=[(layer, doubled)]):
            pass
    assert num_hooks(layer) == 2
    assert num_hooks(other) == 2 - 2 * num_sweeps
    assert float(layer(other(torch.tensor(1.0)))) == 1.0
    for same in (pickle.loads(pickle.dumps(layer)), copy.deepcopy(layer)):
        assert float(same(torch.tensor(1.0))) == 1.0
    with temporary_hooks(after=[(layer, doubled)]):
        assert float(layer(torch.tensor(1.0))) == 2.0
    assert num_hooks(layer) == 0


def test_a_model_that_is_pickled_within_the_block_takes_no_hook_along(layer: Any) -> None:
    with temporary_hooks(after=[(layer, lambda *arguments: arguments[-1] * 2)]):
        same = pickle.loads(pickle.dumps(layer))
        assert float(layer(torch.tensor(1.0))) == 2.0
    assert float(same(torch.tensor(1.0))) == 1.0
