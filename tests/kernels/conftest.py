"""Threads, and what the compiled core computes of layers."""

from collections.abc import Iterator
from types import ModuleType
from typing import Any

import pytest
import torch

from hf_specdec.kernels import cpu


@pytest.fixture(params=[1, 3])
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


class _Noting(ModuleType):
    """The core, with the sizes of all that it computes: tokens of products and norms, and attention's."""

    def __init__(self, original: Any) -> None:
        super().__init__("core")
        self.original, self.products, self.norms, self.attentions = original, [], [], []

    def __getattr__(self, name: str) -> Any:
        return getattr(self.original, name)

    def has_kernels(self) -> bool:
        return True

    def attention(self, addresses: Any, sizes: tuple[int, ...], *others: Any) -> None:
        self.attentions.append(sizes)
        self.original.attention(addresses, sizes, *others)

    def linear(self, *args: Any) -> None:
        self.products.append(args[4])
        self.original.linear(*args)

    def rms_norm(self, *args: Any) -> None:
        self.norms.append(args[3])
        self.original.rms_norm(*args)


@pytest.fixture
def noting(monkeypatch: pytest.MonkeyPatch) -> _Noting:
    """A core that computes all that it can."""
    core = _Noting(cpu.core)
    monkeypatch.setattr(cpu, "core", core)
    return core


@pytest.fixture
def products(noting: _Noting) -> list[int]:
    """The number of tokens of every product."""
    return noting.products


@pytest.fixture
def norms(noting: _Noting) -> list[int]:
    """The number of tokens of every norm."""
    return noting.norms


@pytest.fixture
def calls(noting: _Noting) -> list[tuple[int, ...]]:
    """The sizes of every attention."""
    return noting.attentions


@pytest.fixture(params=[1, 2], ids=["1 thread", "2 threads"])
def shared_threads(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Numbers of threads, of which small layers have all too."""
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    monkeypatch.setattr(cpu, "SHARED_WORK", 1)
    yield
    torch.set_num_threads(before)
