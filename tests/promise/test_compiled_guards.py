"""torch's guards are checked once a call, and in each step where code of the caller's may change the model."""

import dataclasses
from typing import Any

import pytest
import torch
from transformers import StoppingCriteria

import hf_specdec
from hf_specdec import compat
from hf_specdec.compat import without_guards
from hf_specdec.engine.call import Call
from hf_specdec.engine.model_state import state_of
from tests.helpers.cover import wide_but
from tests.helpers.graphs import METHODS, STATIC, counting, on_cpu
from tests.helpers.support import PROMPT, plain, speculative
from tests.helpers.zoo import FAMILIES, build


@pytest.fixture
def model() -> Any:
    """Of one layer, since what is compiled grows with their number."""
    llama = FAMILIES["llama"]
    return hf_specdec.enable(build(dataclasses.replace(llama, options={**llama.options, "num_hidden_layers": 1})))


@pytest.mark.parametrize("method", wide_but(["prompt_lookup"], METHODS))
def test_guards_are_checked_once_a_call_for_each_kind_of_forward(
    model: Any, graphs: list[Any], monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    """And a model that was changed between two calls is compiled anew."""
    checked: list[Any] = []
    monkeypatch.setattr(compat, "without_guards", lambda *_: checked.append(without_guards(*_)) or checked[-1])
    options, config = {"max_new_tokens": 24, **STATIC}, on_cpu(counting(graphs))
    for activation in (torch.nn.SiLU(), torch.nn.Tanh()):
        model.model.layers[0].mlp.act_fn = activation
        expected = plain(model, PROMPT, **options, disable_compile=True)
        for _ in range(2):
            checked.clear()
            settings = {"compile_config": config, "return_dict_in_generate": True}
            output = speculative(model, PROMPT, **options, **settings, **METHODS[method])
            assert output.sequences.equal(expected)
        assert all(checked)
        (forward,) = state_of(model).compiled.values()
        assert 0 < len(checked) <= len(forward.shapes)
        assert output.spec_stats.num_forwards > len(checked) + 1


class CountingMLP(torch.nn.Module):
    """A caller's module: another output from the sixth call on."""

    def __init__(self, inner: Any) -> None:
        super().__init__()
        self.inner, self.calls = inner, 0

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return self.inner(states) * (-30 if self.calls > 5 else 1)


@pytest.mark.filterwarnings("ignore")  # torch says that it compiles a counter again
@pytest.mark.parametrize("kind", ["hook", "module"])
@torch._dynamo.config.patch(recompile_limit=64)
def test_what_a_callers_code_counts_in_the_model_counts_in_each_step(model: Any, graphs: list[Any], kind: str) -> None:
    layer, clean = model.model.layers[0], plain(model, PROMPT, max_new_tokens=10, **STATIC)
    counter = layer.mlp
    if kind == "module":
        counter = layer.mlp = CountingMLP(layer.mlp)
    else:

        def hook(module: Any, args: Any, output: torch.Tensor) -> Any:
            module.calls += 1
            return output * -30 if module.calls > 5 else None

        counter.register_forward_hook(hook)

    def text(**how: Any) -> Any:
        counter.calls = 0
        return model.generate(PROMPT, max_new_tokens=10, **STATIC, **how)

    expected, config = text(disable_compile=True), on_cpu(counting(graphs))
    text(spec_method="plain", compile_config=config)  # which tries the model
    for _ in range(2):
        assert text(spec_method="plain", compile_config=config).equal(expected)
    assert not expected.equal(clean)
    assert state_of(model).compiled


class ChangesTheModel(StoppingCriteria):
    """A caller's criterion that swaps an activation once the text has so many tokens."""

    def __init__(self, model: Any, length: int) -> None:
        self.mlp, self.length = model.model.layers[0].mlp, length
        self.mlp.act_fn = torch.nn.SiLU()

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        if input_ids.shape[1] >= self.length:
            self.mlp.act_fn = torch.nn.Tanh()
        return torch.zeros(len(input_ids), dtype=torch.bool)


@pytest.mark.parametrize("is_seen", [True, False])
def test_what_a_callers_criterion_changes_in_the_model_counts_at_once(
    model: Any, graphs: list[Any], monkeypatch: pytest.MonkeyPatch, is_seen: bool
) -> None:
    if not is_seen:
        monkeypatch.setattr(Call, "is_undisturbed", True)
    options = {"max_new_tokens": 40, **STATIC}
    texts = []
    for settings in ({"disable_compile": True}, {"compile_config": on_cpu(counting(graphs))}):
        criteria = [ChangesTheModel(model, PROMPT.shape[1] + 16)]
        own = {"spec_method": "plain" if texts else None}
        texts.append(model.generate(PROMPT, **options, **settings, **own, stopping_criteria=criteria))
    assert texts[0].equal(texts[1]) is is_seen
