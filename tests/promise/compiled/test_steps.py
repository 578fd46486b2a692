"""Over a static cache steps are compiled as plain generate's are: few graphs for all lengths, the same tokens."""

import dataclasses
import itertools
import logging
from typing import Any

import pytest
import torch

import hf_specdec
from hf_specdec.cache.static_cache import FixedShapes
from hf_specdec.compat import compiling
from hf_specdec.engine import static_shapes
from hf_specdec.engine.model_state import state_of
from hf_specdec.engine.static_shapes import capacity_for, forward_widths
from hf_specdec.forward import compiled_forward
from hf_specdec.forward.compiled_forward import CompiledForward, ForwardWidths
from tests.helpers.cover import wide_but
from tests.helpers.devices import emulate
from tests.helpers.graphs import METHODS, STATIC, counting, on_cpu
from tests.helpers.support import PROMPT, plain, speculative
from tests.helpers.zoo import FAMILIES, build


@pytest.fixture
def model() -> Any:
    """Of one layer, since what is compiled grows with their number."""
    llama = FAMILIES["llama"]
    return hf_specdec.enable(build(dataclasses.replace(llama, options={**llama.options, "num_hidden_layers": 1})))


@pytest.mark.parametrize("batch", wide_but([2], [1, 2]))
@pytest.mark.parametrize("method", wide_but(["prompt_lookup"], METHODS))
def test_few_graphs_serve_texts_of_any_length(model: Any, graphs: list[Any], method: str, batch: int) -> None:
    """One for one token and one for all widths, at most, and as many again that serve all lengths but the first."""
    config = on_cpu(counting(graphs))
    numbers, seconds = [], []
    for length, new in ((20, 18), (9, 16), (20, 18), (5, 24)):
        ids = PROMPT[:, :length].repeat(batch, 1)
        options = {"max_new_tokens": new, **STATIC}
        expected = plain(model, ids, **options, disable_compile=True)
        output = speculative(
            model, ids, **options, compile_config=config, return_dict_in_generate=True, **METHODS[method]
        )
        assert output.sequences.tolist() == expected.tolist()
        stats = output.spec_stats
        assert stats.num_graphs == len(graphs) <= 4
        numbers.append(len(graphs))
        seconds.append(stats.compile_seconds)
    assert numbers[0] > (0 if method == "auto" else 1), "auto may fill its six nodes at every step"
    assert seconds[0] > 0.0
    seen = next(place for place, number in enumerate(numbers) if number == numbers[-1])
    assert all(spent == 0.0 for spent in seconds[seen + 1 :])


def test_the_graphs_of_prompts_without_padding_serve_padded_ones(model: Any, graphs: list[Any]) -> None:
    config, numbers = on_cpu(counting(graphs)), []
    for padding in (0, 10):
        options = {"max_new_tokens": 12, **STATIC, "attention_mask": (torch.arange(30) >= padding).long()[None]}
        expected = plain(model, PROMPT, **options, disable_compile=True)
        output = speculative(model, PROMPT, **options, compile_config=config, **METHODS["prompt_lookup"])
        assert output.equal(expected)
        numbers.append(len(graphs))
    assert 0 < numbers[0] == numbers[1]


@pytest.mark.wide
@pytest.mark.parametrize("is_global", [False, True])
def test_a_hook_that_comes_and_goes_between_two_calls_is_noticed(model: Any, is_global: bool) -> None:
    """A graph would hold what hooks did when it was made: with hooks nothing is compiled."""
    how: dict[str, Any] = {"max_new_tokens": 12, **STATIC, "return_dict_in_generate": True}
    layer = model.model.layers[0]

    def change(module: Any, args: Any, output: Any) -> Any:
        return output * torch.linspace(-1, 2, output.shape[-1]) if module is layer else None

    def texts() -> tuple[list[Any], list[Any]]:
        short: dict[str, Any] = {"spec_method": "prompt_lookup", "spec_config": {"max_draft_len": 3}}
        for _ in range(2):  # the first one tries the model
            ours = model.generate(PROMPT, **how, **short, compile_config=on_cpu("eager"))
        return ours.sequences.tolist(), plain(model, PROMPT, **how, disable_compile=True).sequences.tolist()

    before, expected = texts()
    assert before == expected
    register = torch.nn.modules.module.register_module_forward_hook if is_global else layer.register_forward_hook
    handle = register(change)
    try:
        ours, expected = texts()
        assert ours == expected != before
    finally:
        handle.remove()
    assert texts()[0] == before


@pytest.mark.wide
def test_a_caller_who_forbids_compiling_anew_gets_plains_error_and_later_calls_compile(
    model: Any, graphs: list[Any]
) -> None:
    call = {"max_new_tokens": 4, **STATIC, "compile_config": on_cpu(counting(graphs))}
    expected = plain(model, PROMPT, max_new_tokens=4, **STATIC, disable_compile=True)
    for how in ({}, {"spec_method": "plain"}):
        with torch.compiler.set_stance("fail_on_recompile"), pytest.raises(RuntimeError, match="fail_on_recompile"):
            model.generate(PROMPT, **call, **how)
    output = model.generate(PROMPT, **call, spec_method="plain", return_dict_in_generate=True)
    assert output.sequences.equal(expected)
    assert output.spec_stats.num_graphs


@pytest.mark.wide
def test_sampled_tokens_are_plain_generates(model: Any, graphs: list[Any]) -> None:
    options = STATIC | {"max_new_tokens": 16, "do_sample": True, "top_k": 20}
    torch.manual_seed(3)
    expected = plain(model, PROMPT, **options, disable_compile=True)
    torch.manual_seed(3)
    config = on_cpu(counting(graphs))
    assert speculative(model, PROMPT, **options, compile_config=config, **METHODS["auto"]).equal(expected)
    assert graphs


@pytest.mark.parametrize("settings", [{"disable_compile": True}, {"compile_config": None}], ids=str)
def test_nothing_is_compiled_where_plain_generate_would_not(
    model: Any, graphs: list[Any], settings: dict[str, Any]
) -> None:
    options = {"compile_config": on_cpu(counting(graphs))} | settings
    output = speculative(
        model, PROMPT, max_new_tokens=8, **STATIC, **options, return_dict_in_generate=True, **METHODS["lookahead"]
    )
    assert graphs == []
    assert (output.spec_stats.num_graphs, output.spec_stats.compile_seconds) == (0, 0.0)


def warned_once(model: Any, backend: Any, caplog: pytest.LogCaptureFixture) -> str:
    """The one warning of two calls that cannot be compiled and write plain generate's text."""
    expected = plain(model, PROMPT, max_new_tokens=12, **STATIC)
    with caplog.at_level(logging.WARNING, logger="hf_specdec"):
        for _ in range(2):
            options = {"max_new_tokens": 12, **STATIC, "compile_config": on_cpu(backend)}
            assert speculative(model, PROMPT, **options, **METHODS["prompt_lookup"]).equal(expected)
    (said,) = [record.message for record in caplog.records if "is not compiled" in record.message]
    return said


def test_a_model_that_cannot_be_compiled_runs_as_it_is_and_says_why_once(
    model: Any, graphs: list[Any], caplog: pytest.LogCaptureFixture
) -> None:
    def broken(module: torch.fx.GraphModule, inputs: Any, **_: Any) -> Any:
        graphs.append(inputs)
        raise NotImplementedError("no such card")

    assert "no such card" in warned_once(model, broken, caplog)


@pytest.mark.at_most(1)
@pytest.mark.parametrize("run", [1, 2])
def test_a_graph_that_fails_when_it_runs_is_given_up_and_the_reason_told_once(
    model: Any, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, run: int
) -> None:
    """As a CUDA graph does that cannot be recorded, in the second run of its shape."""
    monkeypatch.setattr(compiled_forward, "is_host", lambda device: False)
    monkeypatch.setattr(compiling, "mark_step_begin", lambda: None)

    def failing(module: torch.fx.GraphModule, inputs: Any, **_: Any) -> Any:
        runs = itertools.count(1)

        def call(*arguments: Any) -> Any:
            if next(runs) == run:
                raise RuntimeError("Cannot copy between CPU and CUDA tensors during CUDA graph capture")
            return module.forward(*arguments)

        return call

    assert "CUDA graph capture" in warned_once(model, failing, caplog)


def test_on_an_accelerator_one_graph_serves_all_widths(
    model: Any, graphs: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(static_shapes, "is_host", lambda device: False)
    config = on_cpu(counting(graphs))
    for length in (20, 12):
        options = {"max_new_tokens": 18, **STATIC}
        expected = plain(model, PROMPT[:, :length], **options)
        options |= {"compile_config": config, "return_dict_in_generate": True}
        output = speculative(model, PROMPT[:, :length], **options, **METHODS["prompt_lookup"])
        assert output.sequences.equal(expected)
    (forward,) = state_of(model).compiled.values()
    assert {width for _, width, _ in forward.shapes} == {2, 16}
    assert output.spec_stats.num_graphs == len(graphs) == 1


@pytest.mark.at_most(1)
@pytest.mark.parametrize("method", METHODS)
def test_on_an_accelerator_forwards_of_a_width_get_the_same_tensors_and_one_graph_takes_their_views(
    model: Any, graphs: list[Any], monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    """Views of one block, which one copy fills."""
    emulate(monkeypatch)
    monkeypatch.setattr(static_shapes, "is_host", lambda device: False)
    monkeypatch.setattr(compiling, "mark_step_begin", lambda: None)  # which imports what warns
    run, seen = CompiledForward._run, dict[int, list[Any]]()

    def noted(self: CompiledForward, shape: tuple[int, ...], inputs: Any, checked: Any) -> Any:
        seen.setdefault(shape[1], []).append((inputs["input_ids"], inputs["attention_mask"]))
        return run(self, shape, inputs, checked)

    monkeypatch.setattr(CompiledForward, "_run", noted)
    options = {"max_new_tokens": 24, **STATIC}
    expected = plain(model, PROMPT, **options)
    options |= {"compile_config": on_cpu(counting(graphs)), **METHODS[method]}
    assert speculative(model, PROMPT, **options).equal(expected)
    assert len(graphs) == 1
    assert any(len(forwards) > 2 for forwards in seen.values())
    for (ids, mask), *others in seen.values():
        assert mask.untyped_storage().data_ptr() == ids.untyped_storage().data_ptr()
        assert all(ours is ids and shown is mask for ours, shown in others)


def test_a_wider_graph_serves_one_token_where_two_take_its_time() -> None:
    on_device, on_cpu = (ForwardWidths(FixedShapes((1, 2, 16), 512, flat_tokens)) for flat_tokens in (128, 0))
    assert [on_device.of(count, 1) for count in (1, 2, 3, 17)] == [2, 2, 16, 17]
    assert on_device.of(1, 65) == 1
    assert on_cpu.of(1, 1) == 1, "on a CPU each token takes its time"


def test_widths_on_a_cpu_are_powers_of_two_and_the_largest() -> None:
    assert forward_widths(1, on_host=True) == (1,)
    assert forward_widths(11, on_host=True) == (1, 2, 4, 8, 11)
    assert forward_widths(64, on_host=True) == (1, 2, 4, 8, 16, 32, 64)
    assert forward_widths(65, on_host=True) == (1, 2, 4, 8, 16, 32, 64, 65)


def test_widths_on_an_accelerator_are_few_and_shared_by_methods() -> None:
    assert forward_widths(1, on_host=False) == (1,)
    assert forward_widths(11, on_host=False) == forward_widths(16, on_host=False) == (1, 2, 16)
    assert forward_widths(65, on_host=False) == forward_widths(95, on_host=False) == (1, 2, 16, 32, 64, 96)
    assert forward_widths(121, on_host=False) == (1, 2, 16, 32, 64, 96, 121)


def test_capacities_are_few_and_an_eighth_too_large_at_most() -> None:
    lengths = range(512, 16_385)
    capacities = [capacity_for(length) for length in lengths]
    assert all(length <= capacity <= length * 1.13 + 64 for length, capacity in zip(lengths, capacities, strict=True))
    assert len(set(capacities)) <= 50


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # of the compiler's own
def test_inductors_forward_gives_the_same_tokens(model: Any) -> None:
    expected = plain(model, PROMPT, max_new_tokens=16, **STATIC)
    options = {"max_new_tokens": 16, **STATIC, "compile_config": on_cpu("inductor", mode="default")}
    output = speculative(model, PROMPT, **options, return_dict_in_generate=True, **METHODS["prompt_lookup"])
    assert output.sequences.equal(expected)
    assert output.spec_stats.num_graphs > 0
    assert output.spec_stats.compile_seconds > 0.0
