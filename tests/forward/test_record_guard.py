"""What is not recorded, and what drops a record: foreign code, and functions that a forward calls by name."""

import gc
import threading
import weakref
from typing import Any

import pytest
import torch
import transformers
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.models.llama import modeling_llama
from transformers.models.llama.modeling_llama import LlamaMLP

from hf_specdec.forward.recorded import forwards
from hf_specdec.forward.recorded.guard import Guard, foreign_part
from hf_specdec.kernels import cpu
from tests.helpers.recorded import generated, model_of, unrecorded

pytestmark = pytest.mark.skipif(cpu.why_unused() is not None, reason="forwards are recorded where the core computes")


@pytest.fixture(autouse=True)
def recorded_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Forwards are recorded when they are first seen."""
    monkeypatch.setattr(forwards, "LEAST_FORWARDS", 1)
    monkeypatch.setattr(forwards, "LEAST_OF_KIND", 1)


class Foreign(torch.nn.Module):
    """A module whose code may do anything."""

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        return states


def test_foreign_code_is_named_and_not_recorded() -> None:
    model = model_of()
    model.model.layers[0].mlp.act_fn = Foreign()
    assert foreign_part(model) == "Foreign"
    output = generated(model)
    assert output.spec_stats.num_replayed == 0
    assert output.spec_stats.record_reason == "Foreign is not torch's or transformers'"


@pytest.mark.parametrize("reader", ["tolist", "numpy", "item"])
def test_a_forward_that_reads_numbers_is_not_recorded(reader: str, monkeypatch: pytest.MonkeyPatch) -> None:
    forward = LlamaMLP.forward

    def reading(self: Any, x: torch.Tensor) -> torch.Tensor:
        number = getattr(x.float().sum(), reader)()
        return forward(self, x) * (1.0 if float(number) > 0 else 0.5)

    reading.__module__ = LlamaMLP.__module__
    monkeypatch.setattr(LlamaMLP, "forward", reading)
    expected, output = unrecorded(model_of()), generated(model_of())
    assert output.spec_stats.num_replayed == 0
    assert "reads numbers of a tensor" in str(output.spec_stats.record_reason)
    assert output.sequences.tolist() == expected.sequences.tolist()


def test_functions_of_a_models_file_that_change_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    model = model_of()
    assert generated(model).spec_stats.num_replayed > 0
    rotate = modeling_llama.rotate_half
    monkeypatch.setattr(modeling_llama, "rotate_half", lambda x: -rotate(x))
    output, expected = generated(model, output_logits=True), unrecorded(model_of(), output_logits=True)
    assert torch.equal(torch.stack(output.logits), torch.stack(expected.logits))


def test_attention_that_is_registered_anew_is_seen() -> None:
    def half(module: Any, query: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        return sdpa_attention_forward(module, query * 0.5, *args, **kwargs)

    model = model_of()
    assert generated(model).spec_stats.num_replayed > 0
    try:
        transformers.AttentionInterface.register("sdpa", half)
        output, expected = generated(model, output_logits=True), unrecorded(model_of(), output_logits=True)
        assert torch.equal(torch.stack(output.logits), torch.stack(expected.logits))
    finally:
        transformers.AttentionInterface.register("sdpa", sdpa_attention_forward)


def test_a_recorded_model_is_freed_with_its_last_reference() -> None:
    """Not when the cyclic collector happens to run."""
    model = model_of()
    assert generated(model).spec_stats.num_replayed > 0
    references = weakref.ref(model), weakref.ref(model.lm_head.weight)
    gc.collect()
    gc.disable()
    try:
        del model
        assert [reference() for reference in references] == [None, None]
    finally:
        gc.enable()


@pytest.mark.parametrize("others", ["none", "criterion", "thread"])
def test_a_model_is_looked_at_in_each_forward_where_other_code_may_run(
    others: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    looks: list[Guard] = []
    is_same = Guard._is_same
    monkeypatch.setattr(Guard, "_is_same", lambda guard, model: (looks.append(guard), is_same(guard, model))[1])
    model, end = model_of(), threading.Event()
    options = {"stopping_criteria": [lambda *_: torch.tensor([False])]} if others == "criterion" else {}
    if others == "thread":
        threading.Thread(target=end.wait, daemon=True).start()
    else:  # than this one: other tests may leave some running
        monkeypatch.setattr(threading, "enumerate", lambda: [threading.current_thread()])
    try:
        generated(model, "plain", **options)
        looks.clear()
        output = generated(model, "plain", **options)
    finally:
        end.set()
    assert output.spec_stats.num_replayed > 2
    assert len(looks) == (1 if others == "none" else output.spec_stats.num_forwards)


def test_a_weight_that_a_criterion_replaces_is_seen() -> None:
    def replacing(model: Any) -> Any:
        def criterion(ids: torch.Tensor, scores: torch.Tensor, **_: Any) -> torch.Tensor:
            if ids.shape[1] == 30:
                model.model.norm.weight.data = -model.model.norm.weight
            return torch.tensor([False])

        return criterion

    first, second = model_of(), model_of()
    generated(first, "plain")
    output = generated(first, "plain", stopping_criteria=[replacing(first)], output_logits=True)
    expected = unrecorded(second, "plain", stopping_criteria=[replacing(second)], output_logits=True)
    assert output.spec_stats.num_replayed > 2
    assert torch.equal(torch.stack(output.logits), torch.stack(expected.logits))
