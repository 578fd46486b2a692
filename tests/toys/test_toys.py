"""A method and a draft head of one folder each work everywhere once they are registered: nothing else knows them."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import hf_specdec
from hf_specdec.loading.drafts import is_draft_head
from hf_specdec.methods import registry
from hf_specdec.methods.common.entry import Method
from hf_specdec.tools.cli.models import draft_of, read_method
from hf_specdec.tools.cli.options import MethodOptions
from hf_specdec.tools.demo.draw.markup import draw_legend
from tests.helpers.support import PROMPT, plain
from tests.toys.repeat.method import METHOD as REPEAT
from tests.toys.repeat.method import RepeatConfig
from tests.toys.shift_head.method import METHOD as SHIFT
from tests.toys.shift_head.method import ShiftHead, save_head


@pytest.fixture(autouse=True)
def toys() -> Iterator[None]:
    before = dict(registry.METHODS)
    for method in (REPEAT, SHIFT):
        registry.register(method)
    yield
    registry._methods.clear()
    registry._methods.update(before)


def generate(model: Any, **how: Any) -> tuple[Any, list[hf_specdec.SpecStep]]:
    steps: list[hf_specdec.SpecStep] = []
    how = {"max_new_tokens": 16, "do_sample": False, "return_dict_in_generate": True} | how
    return model.generate(PROMPT, spec_observer=steps.append, **how), steps


@pytest.mark.parametrize(
    "how",
    [{"spec_method": "repeat"}, {"spec_method": "stutter"}, {"repeat_config": {"num_times": 2}}],
    ids=["by its name", "by its alias", "by its argument"],
)
def test_a_method_is_asked_for_like_any_other(model: Any, how: dict[str, Any]) -> None:
    out, steps = generate(model, **how)
    assert torch.equal(out.sequences, plain(model, PROMPT, max_new_tokens=16, do_sample=False))
    assert out.spec_stats.method == "repeat"
    assert max(step.tree.num_draft_tokens for step in steps) == how.get("repeat_config", {}).get("num_times", 3)
    assert {node.source for step in steps for node in step.nodes} == {"echo"}


def test_its_configuration_is_checked_and_kept_like_any_other(model: Any) -> None:
    with pytest.raises(hf_specdec.ConfigError, match="`num_times` must be a whole number"):
        generate(model, spec_method="repeat", spec_config={"num_times": 0})
    with pytest.raises(hf_specdec.ConfigError, match="Did you mean 'repeat'"):
        generate(model, spec_method="repaet")


def test_the_command_line_reads_it() -> None:
    found = read_method(MethodOptions(spec_method="stutter", spec_config='{"num_times": 2}'))
    assert found == {"spec_method": "repeat", "spec_config": RepeatConfig(num_times=2)}


def test_the_demo_names_its_source() -> None:
    assert "echo</span> <small>the token before, once more" in draw_legend(["echo"])


@pytest.mark.parametrize("name", ["repeat", "auto", "ngram", "mtp_config", "none"])
def test_a_name_is_taken_once(name: str) -> None:
    twice = Method(
        name=name, config_class=RepeatConfig, summary="", make=REPEAT.make, config_arguments=("other_config",)
    )
    with pytest.raises(hf_specdec.ConfigError, match="names that no other method has"):
        registry.register(twice)


@pytest.fixture
def folder(model: Any, tmp_path: Path) -> Path:
    """Files of a head that fits the model."""
    torch.manual_seed(0)
    save_head(ShiftHead(model.config.hidden_size, model.config.vocab_size), tmp_path)
    return tmp_path


ALWAYS = {"confidence_threshold": 0.0}


@pytest.mark.parametrize(
    ("method", "how"),
    [
        ("shift_head", {"spec_method": "shift_head", "spec_config": ALWAYS}),
        ("shift_head", {"shift_config": {"num_branches": 2, **ALWAYS}}),
        ("auto", {"spec_method": "auto"}),
    ],
    ids=["by its name", "by its argument", "besides other sources"],
)
def test_a_head_is_recognised_loaded_and_used_like_any_other(
    model: Any, folder: Path, method: str, how: dict[str, Any]
) -> None:
    assert is_draft_head(folder)
    head = hf_specdec.AutoDraftHead.from_pretrained(folder, target=model)
    assert isinstance(head, ShiftHead)
    out, steps = generate(model, assistant_model=head, **how)
    assert torch.equal(out.sequences, plain(model, PROMPT, max_new_tokens=16, do_sample=False))
    assert out.spec_stats.method == method
    if method != "auto":
        assert {node.source for step in steps for node in step.nodes} == {"shift_head"}


def test_the_command_line_and_the_demo_know_the_head() -> None:
    options = MethodOptions(spec_method="shift_head")
    with pytest.raises(hf_specdec.ConfigError, match="Name a draft head for this model"):
        draft_of(options, read_method(options), "x")
    assert draft_of(MethodOptions(assistant_model="y"), read_method(options), "x") == "y"
    assert "shift head</span> <small>written by a toy" in draw_legend(["shift_head"])
