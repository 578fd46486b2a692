"""Draft heads compile next to a target over a static cache: few graphs for all lengths, the same tokens."""

import dataclasses
import functools
import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers import LlamaConfig

import hf_specdec
from hf_specdec.compat import compiling
from hf_specdec.compat.compiling import without_guards
from hf_specdec.engine.model_state import state_of
from hf_specdec.engine.static_shapes import forward_widths
from tests.helpers.graphs import Recorder, counting, on_cpu
from tests.helpers.heads import CASES, INPUTS, MODES, SHAPES, Zoo, always, random_head
from tests.helpers.support import PROMPT, plain
from tests.helpers.zoo import FAMILIES, build

ONE_LAYER = dataclasses.replace(FAMILIES["llama"], options={**FAMILIES["llama"].options, "num_hidden_layers": 1})
GRAPHS = (
    "eagle3, sliding",
    "mtp, glm4_moe, 3 layers",
    "dflash, gemma3",
)
STATIC: dict[str, Any] = {"cache_implementation": "static"}
Call = Callable[..., Any]


def compiled(target: Any, head: Any, method: str, shape: str = "tree", **options: Any) -> Any:
    """A call whose steps are compiled."""
    options = STATIC | {"do_sample": False, "compile_config": on_cpu("inductor")} | options
    return target.generate(
        assistant_model=head, return_dict_in_generate=True, **always(method, SHAPES[shape]), **options
    )


@pytest.mark.at_most(2)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("inputs", INPUTS)
@pytest.mark.parametrize("name", CASES)
def test_texts_are_plain_generates_and_graphs_are_few(
    zoo: Zoo, recorder: Recorder, name: str, inputs: str, mode: str, shape: str
) -> None:
    """Two for each stage at most, whatever widths and lengths; each for one kind of arguments."""
    target = hf_specdec.disable(CASES[name].target(zoo))
    head = CASES[name].head(hf_specdec.enable(target))
    reference: Call = lambda **options: plain(target, **options)  # noqa: E731
    if inputs == "padded batch" and mode == "sampled":
        reference = lambda **options: target.generate(spec_method="plain", **options)  # noqa: E731
    for new in (14, 9, 14):
        options = {"max_new_tokens": new, **INPUTS[inputs], **MODES[mode]}
        torch.manual_seed(5)
        expected = reference(**options)
        torch.manual_seed(5)
        output = compiled(target, head, CASES[name].method, shape, **options)
        assert torch.equal(output.sequences, expected)
        assert output.spec_stats.num_draft_tokens > 0
        assert output.spec_stats.num_graphs == recorder.num_graphs == len(recorder.kinds)
    (forward,) = state_of(head).compiled.values()
    widths = forward_widths(getattr(head, "block_size", 1 + SHAPES[shape].get("max_nodes", 5)), on_host=True)
    assert 0 < forward.num_graphs <= 2 * getattr(head, "num_stages", 1)
    assert {width for _, width, *_ in forward.shapes} <= set(widths)


@pytest.fixture
def pair() -> tuple[Any, Any]:
    model = hf_specdec.enable(build(ONE_LAYER))
    return model, random_head(model)


@pytest.mark.parametrize("method", ["auto", "eagle3"])
def test_a_head_that_is_rarely_asked_reads_what_it_has_missed(
    pair: tuple[Any, Any], recorder: Recorder, method: str
) -> None:
    expected = plain(pair[0], PROMPT, max_new_tokens=40, do_sample=False)
    how = {"spec_method": method, "spec_config": {"draft_len": 3}}
    options = STATIC | {"max_new_tokens": 40, "do_sample": False, "compile_config": on_cpu("inductor")}
    assert pair[0].generate(PROMPT, assistant_model=pair[1], **options, **how).equal(expected)
    assert state_of(pair[1]).compiled
    assert all(len(kinds) <= 1 for kinds in recorder.kinds)


@pytest.mark.parametrize("options", [{"disable_compile": True}, {"cache_implementation": None}], ids=str)
def test_a_head_is_not_compiled_where_the_target_is_not(
    pair: tuple[Any, Any], recorder: Recorder, options: dict[str, Any]
) -> None:
    output = compiled(*pair, "eagle3", inputs=PROMPT, max_new_tokens=8, **options)
    assert recorder.kinds == []
    assert (output.spec_stats.num_graphs, output.spec_stats.compile_seconds) == (0, 0.0)
    assert state_of(pair[1]).compiled == {}


def test_a_head_that_cannot_be_compiled_says_why_once(
    pair: tuple[Any, Any], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The target is compiled."""

    def compiler(function: Callable[..., Any], settings: Any) -> Callable[..., Any]:
        def run(**inputs: Any) -> Any:
            if "embeddings" in inputs:
                raise NotImplementedError("no such card")
            return function(**inputs)

        return run

    monkeypatch.setattr(compiling, "compiled", compiler)
    expected = plain(pair[0], PROMPT, max_new_tokens=12, do_sample=False)
    with caplog.at_level(logging.WARNING, logger="hf_specdec"):
        for _ in range(2):
            assert compiled(*pair, "eagle3", inputs=PROMPT, max_new_tokens=12).sequences.equal(expected)
    said = [record.message for record in caplog.records if "is not compiled" in record.message]
    assert len(said) == 1
    assert "Eagle3Head is not compiled: NotImplementedError no such card" in said[0]


def test_rotary_frequencies_that_follow_the_text_are_not_compiled(
    pair: tuple[Any, Any], recorder: Recorder, caplog: pytest.LogCaptureFixture
) -> None:
    model, _ = pair
    rope = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}
    head = random_head(model, layer_class=functools.partial(LlamaConfig, rope_parameters=rope))
    with caplog.at_level(logging.WARNING, logger="hf_specdec"):
        compiled(model, head, "eagle3", inputs=PROMPT, max_new_tokens=8)
    assert "Eagle3Head is not compiled: its rotary frequencies follow the text's length" in caplog.text
    assert state_of(head).compiled == {}


@pytest.mark.wide
@pytest.mark.parametrize("name", GRAPHS)
def test_torchs_compiler_makes_as_many_graphs_as_are_counted(
    zoo: Zoo, graphs: list[Any], monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """And a later forward of a call goes without guards, the target's and the head's."""
    direct: list[Any] = []
    monkeypatch.setattr(compiling, "without_guards", lambda *_: direct.append(without_guards(*_)) or direct[-1])
    target = hf_specdec.disable(CASES[name].target(zoo))
    head, numbers, config = CASES[name].head(hf_specdec.enable(target)), [], on_cpu(counting(graphs))
    for length, new in ((20, 12), (9, 16), (12, 14), (20, 12)):
        ids = PROMPT[:, :length].repeat(2, 1)
        expected = plain(target, ids, max_new_tokens=new, do_sample=False)
        options = {"max_new_tokens": new, "compile_config": config}
        output = compiled(target, head, CASES[name].method, "chain", inputs=ids, **options)
        assert output.sequences.equal(expected)
        assert output.spec_stats.num_graphs == len(graphs)
        numbers.append(len(graphs))
    assert direct and all(direct)
    assert numbers[-1] <= numbers[0] + 2, "a width that was not used before"


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # of the compiler's own
def test_inductors_forward_gives_the_same_tokens(pair: tuple[Any, Any]) -> None:
    expected = plain(pair[0], PROMPT, max_new_tokens=16, do_sample=False)
    config = on_cpu("inductor", mode="default")
    output = compiled(*pair, "eagle3", inputs=PROMPT, max_new_tokens=16, compile_config=config)
    assert output.sequences.equal(expected)
    (forward,) = state_of(pair[1]).compiled.values()
    assert forward.shapes
    assert forward.reason is None
