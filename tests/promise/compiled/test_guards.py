"""torch's guards are checked once a call, and in each step where code of the caller's may change the model."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from transformers import StoppingCriteria
from transformers.generation.streamers import BaseStreamer

import hf_specdec
from hf_specdec.common.tree import DraftTree
from hf_specdec.compat import compiling
from hf_specdec.compat.compiling import without_guards
from hf_specdec.engine.model_state import state_of
from hf_specdec.methods.common.drafter import Drafter
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
    monkeypatch.setattr(compiling, "without_guards", lambda *_: checked.append(without_guards(*_)) or checked[-1])
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
    """A caller's module: another output from the third call on."""

    def __init__(self, inner: Any) -> None:
        super().__init__()
        self.inner, self.calls = inner, 0

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return self.inner(states) * (-30 if self.calls > 2 else 1)


@pytest.mark.filterwarnings("ignore")  # torch says that it compiles a counter again
@pytest.mark.parametrize("kind", wide_but(["module"], ["hook", "module"]))
@torch._dynamo.config.patch(recompile_limit=64)
def test_what_a_callers_code_counts_in_the_model_counts_in_each_step(model: Any, graphs: list[Any], kind: str) -> None:
    layer, clean = model.model.layers[0], plain(model, PROMPT, max_new_tokens=5, **STATIC)
    counter = layer.mlp
    if kind == "module":
        counter = layer.mlp = CountingMLP(layer.mlp)
    else:

        def hook(module: Any, args: Any, output: torch.Tensor) -> Any:
            module.calls += 1
            return output * -30 if module.calls > 2 else None

        counter.register_forward_hook(hook)

    def text(**how: Any) -> Any:
        counter.calls = 0
        return model.generate(PROMPT, max_new_tokens=5, **STATIC, **how)

    expected, config = text(disable_compile=True), on_cpu(counting(graphs))
    text(spec_method="plain", compile_config=config)  # which tries the model
    for _ in range(2):
        assert text(spec_method="plain", compile_config=config).equal(expected)
    assert not expected.equal(clean)
    assert bool(state_of(model).compiled) == (kind == "module")  # with hooks nothing is compiled


class Change:
    """Swaps an activation of the model when it has been called so many times."""

    def __init__(self, model: Any, num_calls: int = 16) -> None:
        self.mlp, self.num_left = model.model.layers[0].mlp, num_calls
        self.mlp.act_fn = torch.nn.SiLU()

    def __call__(self, *_: Any) -> None:
        self.num_left -= 1
        if not self.num_left:
            self.mlp.act_fn = torch.nn.Tanh()


class Criterion(StoppingCriteria):
    def __init__(self, change: Change) -> None:
        self.change = change

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        self.change()
        return torch.zeros(len(input_ids), dtype=torch.bool)


class Streamer(BaseStreamer):
    def __init__(self, change: Change) -> None:
        self.change = change

    def put(self, value: torch.Tensor) -> None:
        self.change()

    def end(self) -> None:
        pass


class OwnDrafter(Drafter):
    """Drafts nothing."""

    def __init__(self, change: Change) -> None:
        self.change = change

    def begin(self, prompt_ids: Sequence[int]) -> None:
        self.root = prompt_ids[-1]

    def propose(self, budget: int) -> DraftTree:
        self.change()
        return DraftTree.chain(self.root)

    def observe(self, tree: DraftTree, logits: torch.Tensor | None, accepted: Sequence[int]) -> None:
        self.root = accepted[-1]


CALLERS: dict[str, Callable[[Change], dict[str, Any]]] = {
    "criterion": lambda change: {"spec_method": "plain", "stopping_criteria": [Criterion(change)]},
    "criterion of a row": lambda change: {
        "spec_method": "plain",
        "stopping_criteria": [hf_specdec.PerRow(lambda row: Criterion(change))],
    },
    "streamer": lambda change: {"spec_method": "plain", "streamer": Streamer(change)},
    "observer": lambda change: {"spec_method": "plain", "spec_observer": change},
    "drafter": lambda change: {"spec_method": OwnDrafter(change)},
}


def texts_with(model: Any, graphs: list[Any], caller: str) -> tuple[list[int], list[int]]:
    """Of a call that is not compiled and of one that is; the caller changes the model in the middle of both."""
    model.generate(PROMPT, max_new_tokens=2, spec_method="plain")  # which tries the model
    texts = []
    for settings in ({"disable_compile": True}, {"compile_config": on_cpu(counting(graphs))}):
        how = CALLERS[caller](Change(model))
        texts.append(model.generate(PROMPT, max_new_tokens=40, **STATIC, **settings, **how)[0].tolist())
    return texts[0], texts[1]


@pytest.mark.parametrize("caller", CALLERS)
def test_what_a_callers_code_changes_in_the_model_counts_at_once(model: Any, graphs: list[Any], caller: str) -> None:
    expected, compiled = texts_with(model, graphs, caller)
    assert compiled == expected


def of(**options: Any) -> Any:
    llama = FAMILIES["llama"]
    return build(dataclasses.replace(llama, options={**llama.options, **options}))


@pytest.mark.at_most(1)
@pytest.mark.parametrize(
    ("before", "after"),
    [
        ({"num_hidden_layers": 2}, {"num_hidden_layers": 1}),
        ({"num_hidden_layers": 1}, {"num_hidden_layers": 2}),
        ({"num_hidden_layers": 1, "num_key_value_heads": 2}, {"num_hidden_layers": 1, "num_key_value_heads": 4}),
        ({"num_hidden_layers": 1, "num_key_value_heads": 4}, {"num_hidden_layers": 1, "num_key_value_heads": 2}),
    ],
)
@pytest.mark.parametrize("is_draft", [False, True])
def test_layers_that_are_exchanged_between_two_calls_get_buffers_of_their_own(
    graphs: list[Any], before: dict[str, Any], after: dict[str, Any], is_draft: bool
) -> None:
    changed, other, config = of(**before), of(**after), on_cpu(counting(graphs))
    target = hf_specdec.enable(of() if is_draft else changed)
    how = {"spec_method": "draft_model", "assistant_model": changed} if is_draft else {"spec_method": "plain"}
    for _ in range(2):
        output = target.generate(
            PROMPT, max_new_tokens=4, **STATIC, compile_config=config, return_dict_in_generate=True, **how
        )
        assert output.sequences.equal(plain(target, PROMPT, max_new_tokens=4, **STATIC, disable_compile=True))
        changed.model.layers = other.model.layers
        changed.config.num_hidden_layers = other.config.num_hidden_layers
        changed.config.num_key_value_heads = other.config.num_key_value_heads
