"""A `custom_generate` folder gives plain generation's text to models that were never enabled."""

from pathlib import Path
from typing import Any

import pytest
import transformers

import hf_specdec
from hf_specdec.loading import hub
from tests.helpers.support import plain

OPTIONS: dict[str, Any] = {"max_new_tokens": 16, "do_sample": False}


@pytest.fixture(autouse=True)
def own_module_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """transformers copies remote code; here it goes to the test's folder."""
    from transformers import dynamic_module_utils

    monkeypatch.setattr(dynamic_module_utils, "HF_MODULES_CACHE", str(tmp_path / "modules"))


@pytest.fixture
def unenabled() -> Any:
    return transformers.AutoModelForCausalLM.from_pretrained(hf_specdec.embedded.path("target"), dtype="float32")


@pytest.fixture
def inputs(tokenizer: Any) -> dict[str, Any]:
    return {"input_ids": tokenizer("def main(argv=None):\n    parser = ", return_tensors="pt").input_ids}


def test_the_folder_works_without_enable(unenabled: Any, inputs: dict[str, Any], tmp_path: Path) -> None:
    folder = str(hub.export(tmp_path / "repository", spec_method="prompt_lookup", spec_config={"max_draft_len": 6}))
    expected = plain(unenabled, **inputs, **OPTIONS).tolist()
    remote: dict[str, Any] = {"custom_generate": folder, "trust_remote_code": True, **OPTIONS}
    output = unenabled.generate(**inputs, **remote, return_dict_in_generate=True)
    assert output.sequences.tolist() == expected
    assert output.spec_stats.method == "prompt_lookup"
    other = unenabled.generate(
        **inputs, **remote, spec_method="lookahead", lookahead_config=[3, 3, 3], return_dict_in_generate=True
    )
    assert other.sequences.tolist() == expected
    assert other.spec_stats.method == "lookahead"
    assert "generate" not in vars(unenabled)


def test_streamers_and_stop_strings_reach_it(
    unenabled: Any, tokenizer: Any, inputs: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = str(hub.export(tmp_path / "repository"))
    options: dict[str, Any] = {"max_new_tokens": 40, "do_sample": False, "stop_strings": ["("], "tokenizer": tokenizer}
    expected = plain(unenabled, **inputs, **options, streamer=transformers.TextStreamer(tokenizer)).tolist()
    shown = capsys.readouterr().out
    streamer = transformers.TextStreamer(tokenizer)
    ours = unenabled.generate(
        **inputs, **options, streamer=streamer, custom_generate=folder, trust_remote_code=True
    ).tolist()
    assert ours == expected
    assert capsys.readouterr().out == shown


def test_a_checkpoint_with_it_generates_so_by_itself(unenabled: Any, inputs: dict[str, Any], tmp_path: Path) -> None:
    folder = tmp_path / "checkpoint"
    unenabled.save_pretrained(folder)
    hub.export(folder, spec_method="prompt_lookup")
    loaded = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype="float32", trust_remote_code=True)
    output = loaded.generate(**inputs, **OPTIONS, return_dict_in_generate=True)
    assert output.spec_stats.method == "prompt_lookup"
    assert output.sequences.tolist() == plain(unenabled, **inputs, **OPTIONS).tolist()


def test_exporting_again_changes_the_defaults(tmp_path: Path) -> None:
    hub.export(tmp_path, spec_method="prompt_lookup")
    hub.export(tmp_path, spec_method="lookahead", spec_config=[3, 3, 3])
    assert '"spec_method": "lookahead"' in (tmp_path / "custom_generate" / "generate.py").read_text()
    assert "hf_specdec>=" in (tmp_path / "custom_generate" / "requirements.txt").read_text()


def test_a_script_of_another_author_is_kept(tmp_path: Path) -> None:
    (tmp_path / "custom_generate").mkdir()
    (tmp_path / "custom_generate" / "generate.py").write_bytes(b"\xff")
    with pytest.raises(hf_specdec.ConfigError, match="another author"):
        hub.export(tmp_path)


def test_a_wrong_configuration_is_found_at_once(tmp_path: Path) -> None:
    with pytest.raises(hf_specdec.ConfigError, match="max_draft_len"):
        hub.export(tmp_path / "new", spec_method="prompt_lookup", spec_config={"max_draft_len": 0})
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize(
    ("field", "call"),
    [
        ("folder", lambda place: hub.export(3)),  # type: ignore[arg-type]
        ("folder", lambda place: hub.export(__file__)),
        ("path", lambda place: hf_specdec.AutoDraftHead.from_pretrained(3)),  # type: ignore[arg-type]
    ],
)
def test_a_value_of_another_kind_is_named_and_nothing_is_written(tmp_path: Path, field: str, call: Any) -> None:
    with pytest.raises(hf_specdec.ConfigError) as error:
        call(tmp_path / "new")
    assert error.value.field == field
    assert not any(tmp_path.iterdir())
