"""What is kept about a model holds as long as the model computes alike: whatever is done to it between two calls, the
text is plain's; what has passed is tried again; and where nothing has changed, nothing is tried twice.
"""

import types
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

import hf_specdec
from hf_specdec.forward.capabilities import findings
from tests.helpers.support import DRAFTS, MASK, METHODS, PADDED, PROMPT, method_of, noisy_copy, plain
from tests.helpers.zoo import FAMILIES, build

pytestmark = pytest.mark.probes_anew
CALL: dict[str, Any] = {"max_new_tokens": 12, "do_sample": False}
BATCH: dict[str, Any] = {**CALL, "attention_mask": MASK}


@pytest.fixture
def fresh() -> Any:
    return hf_specdec.enable(build(FAMILIES["llama"]))


@pytest.fixture
def num_probes(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Grows by one entry with each probe."""
    probes: list[int] = []
    probe, probe_rows = findings.probe, findings.probe_rows
    monkeypatch.setattr(findings, "probe", lambda *args: probes.append(1) or probe(*args))
    monkeypatch.setattr(findings, "probe_rows", lambda *args: probes.append(2) or probe_rows(*args))
    return probes


def steered(output: Any) -> Any:
    """Hidden states whose last position points elsewhere: the position that plain decoding looks at."""
    states = (output[0] if isinstance(output, tuple) else output).clone()
    states[:, -1] = states[:, -1].flip(-1)
    return (states, *output[1:]) if isinstance(output, tuple) else states


class Steered(torch.nn.Module):
    def __init__(self, inner: Any) -> None:
        super().__init__()
        self.inner = inner
        self.eval()

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return steered(self.inner(*args, **kwargs))


def hook(model: Any) -> Callable[[], Any]:
    return model.model.layers[1].register_forward_hook(lambda module, args, output: steered(output)).remove


def pre_hook(model: Any) -> Callable[[], Any]:
    def change(module: Any, args: Any) -> Any:
        return tuple(steered(arg) for arg in args)

    return model.lm_head.register_forward_pre_hook(change).remove


def global_hook(model: Any) -> Callable[[], Any]:
    def change(module: Any, args: Any, output: Any) -> Any:
        return steered(output) if module is model.model.norm else None

    return torch.nn.modules.module.register_module_forward_hook(change).remove


def patch(model: Any) -> Callable[[], Any]:
    layer = model.model.layers[1]
    inner = type(layer).forward
    layer.forward = types.MethodType(lambda self, *args, **kwargs: steered(inner(self, *args, **kwargs)), layer)
    return lambda: delattr(layer, "forward")


def patched_class(model: Any) -> Callable[[], Any]:
    cls, inner = type(model.model.norm), type(model.model.norm).forward

    def forward(self: Any, states: Any) -> Any:
        return steered(inner(self, states)) if self is model.model.norm else inner(self, states)

    cls.forward = forward
    return lambda: setattr(cls, "forward", inner)


def swap(model: Any) -> Callable[[], Any]:
    mlp = model.model.layers[1].mlp
    model.model.layers[1].mlp = Steered(mlp)
    return lambda: setattr(model.model.layers[1], "mlp", mlp)


CHANGES = [hook, pre_hook, global_hook, patch, patched_class, swap]


@pytest.fixture(params=CHANGES, ids=lambda change: change.__name__)
def change(request: pytest.FixtureRequest) -> Iterator[Callable[[Any], Callable[[], Any]]]:
    """Does something to a model; undone at the end, if the test has not done that."""
    undos: list[Callable[[], Any]] = []

    def done(model: Any) -> Callable[[], Any]:
        undos.append(request.param(model))
        return lambda: undos.pop()()

    yield done
    for undo in undos:
        undo()


def texts(model: Any, methods: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """What the methods and many prompts make of it."""
    output = {name: model.generate(PROMPT, **CALL, **method).tolist() for name, method in methods.items()}
    output["batch"] = model.generate(PADDED, **BATCH, spec_method="prompt_lookup").tolist()
    output["many"] = [result.token_ids for result in hf_specdec.generate_many(model, [PROMPT], **CALL)]
    return output


@pytest.mark.at_most(1)
def test_what_is_done_to_a_model_between_two_calls_is_noticed(fresh: Any, change: Any) -> None:
    methods = {name: method_of(name, noisy_copy(fresh)) for name in METHODS}
    before = plain(fresh, PROMPT, **CALL).tolist()
    expected = {"batch": plain(fresh, PADDED, **BATCH).tolist(), "many": [before[0][PROMPT.shape[1] :]]}
    expected |= dict.fromkeys(methods, before)
    assert texts(fresh, methods) == expected
    undo = change(fresh)
    after = plain(fresh, PROMPT, **CALL).tolist()
    assert after != before, "the change makes a difference"
    changed = {"batch": plain(fresh, PADDED, **BATCH).tolist(), "many": [after[0][PROMPT.shape[1] :]]}
    methods = {name: method for name, method in methods.items() if name != "lookahead"}
    changed |= dict.fromkeys(methods, after)
    assert texts(fresh, methods) == changed
    undo()
    output = fresh.generate(PROMPT, **CALL, return_dict_in_generate=True, **DRAFTS["oracle"](before[0]))
    assert output.sequences.tolist() == before
    assert output.spec_stats.num_accepted_tokens > 0


def test_a_hook_that_counts_and_takes_times_is_no_change(fresh: Any, num_probes: list[int]) -> None:
    """But for the first call, after which its numbers are not 0 any more."""

    class Timer:
        def __init__(self) -> None:
            self.calls, self.seconds = 0, 0.0

        def __call__(self, *args: Any) -> None:
            self.calls += 1
            self.seconds += 0.1

    fresh.model.layers[0].register_forward_hook(Timer())
    for _ in range(4):
        fresh.generate(PROMPT, **CALL, spec_method="prompt_lookup")
    assert num_probes == [1, 1]


def test_gradient_checkpointing_switched_off_and_on_is_no_change(fresh: Any, num_probes: list[int]) -> None:
    """As trainers do around each `generate`; transformers sets a hook anew each time."""
    fresh.enable_input_require_grads()
    for _ in range(3):
        fresh.disable_input_require_grads()
        fresh.enable_input_require_grads()
        fresh.generate(PROMPT, **CALL, spec_method="prompt_lookup")
    assert fresh.get_input_embeddings()._forward_hooks
    assert num_probes == [1]


def test_nothing_is_tried_twice_where_nothing_has_changed(fresh: Any, num_probes: list[int]) -> None:
    """Outputs that transformers collects by hooks, threads' own forwards and changed weights are no change."""
    for _ in range(2):
        fresh.generate(PROMPT, **CALL, spec_method="prompt_lookup")
        fresh.generate(PADDED, **BATCH, spec_method="prompt_lookup")
        fresh(PROMPT, output_hidden_states=True)
        with torch.no_grad():
            fresh.lm_head.weight.mul_(1.01)
    assert num_probes == [1, 2]


def test_a_change_back_and_forth_is_tried_once(fresh: Any, num_probes: list[int]) -> None:
    for implementation in ("sdpa", "eager") * 3:
        fresh.set_attn_implementation(implementation)
        fresh.generate(PROMPT, **CALL, spec_method="prompt_lookup")
    assert len(num_probes) == 2


def tier(model: Any, ids: torch.Tensor = PROMPT, **kwargs: Any) -> str:
    output = model.generate(ids, **CALL, return_dict_in_generate=True, **{"spec_method": "prompt_lookup", **kwargs})
    result: str = output.spec_stats.tier
    return result


def test_a_batch_in_train_mode_leaves_nothing_behind() -> None:
    """Its dropout makes every forward another."""
    model = hf_specdec.enable(build(FAMILIES["gpt2"]))
    model.transformer.drop.p = 0.5
    model.train()
    assert tier(model, PADDED, attention_mask=MASK) == "plain"
    model.eval()
    assert tier(model, PADDED, attention_mask=MASK) == "tree"


@pytest.mark.parametrize("error", [torch.OutOfMemoryError("CUDA out of memory."), MemoryError(), OSError("disk")])
def test_a_fault_that_has_passed_is_forgotten(fresh: Any, error: Exception) -> None:
    """The same hook all along, so that nothing about the model changes."""
    is_full, is_full_for_rows = True, True

    def allocate(module: Any, args: Any) -> None:
        rows, width = args[0].shape
        if 1 < width < 9 and (is_full or (is_full_for_rows and rows > 1)):
            raise error

    fresh.get_input_embeddings().register_forward_pre_hook(allocate)
    assert tier(fresh) == "plain"
    is_full = False
    assert tier(fresh) == "tree"
    assert tier(fresh, PADDED, attention_mask=MASK) == "plain"
    is_full_for_rows = False
    assert tier(fresh, PADDED, attention_mask=MASK) == "tree"


def test_weights_that_were_nan_are_tried_again(fresh: Any) -> None:
    with torch.no_grad():
        row = fresh.model.norm.weight.clone()
        fresh.model.norm.weight.fill_(float("nan"))
        assert tier(fresh) == "plain"
        fresh.model.norm.weight.copy_(row)
    assert tier(fresh) == "tree"
