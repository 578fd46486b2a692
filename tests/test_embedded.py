"""The embedded models: what the package ships loads, fits together, and drafts what the target writes."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import hf_specdec
from hf_specdec.errors import ConfigError
from hf_specdec.loading.embedded import unpack
from tests.helpers.support import plain

PROMPT = "def read_lines(path):\n    "


@pytest.fixture(scope="module")
def target() -> Any:
    return hf_specdec.AutoModelForCausalLM.from_pretrained(hf_specdec.embedded.path("target"), precision="fp32")


@pytest.mark.at_most(1)
@pytest.mark.parametrize(
    ("method", "name", "accepted_per_step"),
    [("draft_model", "draft", 0.3), ("eagle3", "head", 0.8), ("auto", "head", 0.8)],
)
def test_a_draft_of_the_package_is_accepted(
    method: str, name: str, accepted_per_step: float, target: Any, tokenizer: Any
) -> None:
    load = hf_specdec.AutoDraftHead if name == "head" else hf_specdec.AutoModelForCausalLM
    draft = load.from_pretrained(hf_specdec.embedded.path(name), dtype=torch.float32)
    ids = tokenizer(PROMPT, return_tensors="pt").input_ids
    settings: dict[str, Any] = {"max_new_tokens": 48, "do_sample": False}
    config = {"num_nodes": 8} if method == "auto" else {}
    how = {"spec_method": method, "assistant_model": draft, "spec_config": config}
    output = target.generate(ids, **settings, **how, return_dict_in_generate=True)
    assert output.sequences.tolist() == plain(target, ids, **settings).tolist()
    assert output.spec_stats.num_accepted_tokens / output.spec_stats.num_drafts > accepted_per_step


@pytest.mark.at_most(1)
@pytest.mark.parametrize(
    ("method", "config"),
    [
        ("alone", {"num_branches": 1, "confidence_threshold": 0.0}),
        ("alone", {"num_branches": 3, "use_logits": True}),
        ("auto", {"num_nodes": 8}),
    ],
    ids=["chain", "drawn tree", "auto"],
)
@pytest.mark.parametrize("name", ["draft", "head"])
@pytest.mark.parametrize("do_sample", [False, True])
def test_a_draft_is_asked_for_no_more_than_the_text_has_room_for(
    do_sample: bool, name: str, method: str, config: Any, target: Any, tokenizer: Any
) -> None:
    load = hf_specdec.AutoDraftHead if name == "head" else hf_specdec.AutoModelForCausalLM
    draft = load.from_pretrained(hf_specdec.embedded.path(name), dtype=torch.float32)
    ids = tokenizer(PROMPT, return_tensors="pt").input_ids
    forwards: list[int] = []
    draft.register_forward_hook(lambda *call: forwards.append(1))
    num_reading = int(name == "draft")  # the first step's, of the prompt; a head reads it with its first draft
    steps: list[tuple[int, int]] = []

    def observe(step: hf_specdec.SpecStep) -> None:
        steps.append((len(forwards), len(step.accepted)))
        forwards.clear()

    own = "eagle3" if name == "head" else "draft_model"
    how: dict[str, Any] = {"spec_method": own if method == "alone" else method, "assistant_model": draft}
    how["spec_config"] = {"draft_len": 4, **config}
    target.generate(ids, max_new_tokens=8, do_sample=do_sample, **how)  # tries forwards out
    for most in range(2, 8):
        torch.manual_seed(most)
        steps.clear()
        forwards.clear()
        target.generate(ids, max_new_tokens=most, do_sample=do_sample, **how, spec_observer=observe)
        left = most - 1 - sum(accepted for _, accepted in steps)
        assert left <= 0
        for place, (number, accepted) in reversed(list(enumerate(steps))):
            left += accepted
            drafting = number - num_reading if place == 0 and number else number
            assert drafting <= min(4, left - 1), (most, steps)


def test_packed_weights_differ_by_half_a_level_at_most(tmp_path: Path) -> None:
    """And what is no matrix stays as it is."""
    weights = {"matrix": torch.randn(5, 64).bfloat16(), "zeros": torch.zeros(2, 8).bfloat16()}
    others = {"norm": torch.randn(64).bfloat16(), "ids": torch.arange(9)}
    (tmp_path / "packed").mkdir()
    (tmp_path / "packed" / "config.json").write_text("{}")
    packed = dict(others)
    for name, weight in weights.items():
        scale = (weight.float().abs().amax(1, keepdim=True) / 63).clamp_min(torch.finfo(torch.float16).tiny).half()
        packed |= {name: (weight.float() / scale.float()).round().to(torch.int8), f"{name}.scale": scale}
    save_file(packed, tmp_path / "packed" / "packed.safetensors")
    unpack(tmp_path / "packed", tmp_path / "checkpoint")
    loaded = load_file(tmp_path / "checkpoint" / "model.safetensors")
    assert sorted(file.name for file in (tmp_path / "checkpoint").iterdir()) == ["config.json", "model.safetensors"]
    assert loaded.keys() == weights.keys() | others.keys()
    assert all(torch.equal(loaded[name], tensor) for name, tensor in others.items())
    for name, weight in weights.items():
        level = weight.float().abs().amax(1, keepdim=True) / 63
        assert loaded[name].dtype == torch.bfloat16
        assert ((loaded[name].float() - weight.float()).abs() <= 0.5 * level + weight.float().abs() / 128).all()


def test_a_checkpoint_is_written_once_into_the_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    folder = Path(hf_specdec.embedded.path("draft"))
    assert folder.is_relative_to(tmp_path / "hf_specdec" / "models")
    written = (folder / "model.safetensors").stat().st_mtime_ns
    assert hf_specdec.embedded.path("draft") == str(folder)
    assert (folder / "model.safetensors").stat().st_mtime_ns == written
    assert [path.name for path in folder.parent.iterdir()] == ["draft"]


def test_a_cache_that_cannot_be_written_names_the_remedy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    with pytest.raises(ConfigError, match="`folder` must be where files can be written.*Set XDG_CACHE_HOME"):
        hf_specdec.embedded.path("draft")


def test_another_name_is_refused() -> None:
    with pytest.raises(ConfigError, match="'draft', 'head', 'smollm2-head', 'target'"):
        hf_specdec.embedded.path("teacher")
