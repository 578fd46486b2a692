"""Compiled graphs that are called with arguments collected once."""

import sys
import threading
from typing import Any

import pytest
import torch
from transformers.modeling_outputs import CausalLMOutput

from hf_specdec.compat import compiling
from hf_specdec.compat.compiling import attributes_of
from tests.helpers.graphs import counting


@pytest.fixture(autouse=True)
def fresh_compiler() -> Any:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


class Affine(torch.nn.Module):
    """A module whose forward may keep its argument, as an attribute or a buffer."""

    last: torch.Tensor | None

    def __init__(self, *, keeps: str) -> None:
        super().__init__()
        self.weight, self.keeps = torch.nn.Parameter(torch.full((3,), 2.0)), bool(keeps)
        if keeps == "buffer":
            self.register_buffer("last", torch.zeros(3))
        else:
            self.last = None

    def forward(self, x: torch.Tensor, shift: dict[str, torch.Tensor]) -> Any:
        if self.keeps:
            self.last = x
        return CausalLMOutput(logits=self.weight * x + shift["by"]), x.sum()


@pytest.mark.parametrize("keeps", ["", "attribute", "buffer"])
def test_a_bound_graph_takes_the_tensors_of_its_call_and_one_that_assigns_attributes_is_not_bound(keeps: str) -> None:
    model = Affine(keeps=keeps)
    step = compiling.compiled(lambda **inputs: model(**inputs), {"backend": counting([])})

    def inputs(value: float) -> dict[str, Any]:
        return {"x": torch.full((3,), value), "shift": {"by": torch.full((3,), 10 * value)}}

    with torch.no_grad():
        for _ in range(3):
            step(**inputs(0.0))
        direct = compiling.without_guards(step, inputs(1.0))
        assert direct is not None
        for value in (1.0, 2.0):
            values = inputs(value)
            result, bound = direct.bind(values, lambda: [model])
            assert result[0].logits.tolist() == [12 * value] * 3
            assert model.last is (values["x"] if keeps else None)
            assert (bound is None) == bool(keeps)
            if bound is not None:
                again = bound(**inputs(3.0))
                assert again[0].logits.tolist() == [36.0] * 3
                assert float(again[1]) == 9.0


def test_a_graph_is_not_bound_where_the_function_returns_what_is_not_the_graphs() -> None:
    kept = torch.ones(2)
    step = compiling.compiled(lambda **inputs: (inputs["x"] * 2, kept), {"backend": counting([])})
    step(x=torch.ones(2))
    direct = compiling.without_guards(step, {"x": torch.ones(2)})
    assert direct is not None
    result, bound = direct.bind({"x": torch.ones(2)}, list)
    assert result[1] is kept
    assert bound is None


def test_attributes_are_read_while_another_thread_adds_and_removes_some() -> None:
    """As calls without a static cache do at each forward, where kernels of this package compute a layer."""
    layers, has_ended = [torch.nn.Identity() for _ in range(300)], threading.Event()

    def replace_forwards() -> None:
        while not has_ended.is_set():
            for layer in layers:
                vars(layer)["forward"] = vars(layer)["_parameters"]["forward"] = None
            for layer in layers:
                del vars(layer)["forward"], vars(layer)["_parameters"]["forward"]

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    thread = threading.Thread(target=replace_forwards)
    thread.start()
    try:
        assert all(attributes_of(layers) for _ in range(1000))
    finally:
        has_ended.set()
        thread.join()
        sys.setswitchinterval(interval)
