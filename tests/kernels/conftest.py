"""Threads, and what the compiled core computes of linear layers."""

from collections.abc import Iterator
from types import ModuleType
from typing import Any

import pytest
import torch

from hf_specdec.kernels import cpu
from tests.kernels.linear_cases import decided


@pytest.fixture(params=[1, 3])
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


@pytest.fixture
def products(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """The number of tokens of every product that the core computes; it computes all that it can."""
    seen: list[int] = []
    original = cpu.core.linear

    class Noting(ModuleType):
        @staticmethod
        def has_kernels() -> bool:
            return True

        @staticmethod
        def linear(*args: Any) -> None:
            seen.append(args[4])
            original(*args)

    monkeypatch.setattr(cpu, "core", Noting("core"))
    monkeypatch.setattr(cpu, "trial", lambda size: decided(is_ours=True))
    yield seen
