"""What is no path is named by every function that takes one, and nothing is read or written."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

import hf_specdec
from hf_specdec import CheckpointError, ConfigError, SpecMemory
from hf_specdec.common.files import check_output, replacing
from hf_specdec.loading import hub
from hf_specdec.loading.checkpoints.tokenizers import load_tokenizer
from hf_specdec.tools import bench
from hf_specdec.tools.train import train_head
from tests.helpers.zoo import FAMILIES, build

FUNCTIONS: dict[str, tuple[str, Callable[[Any], Any]]] = {
    "SpecMemory.load": ("path", SpecMemory.load),
    "SpecMemory.save": ("path", SpecMemory().save),
    "hub.export": ("folder", hub.export),
    "AutoModelForCausalLM.from_pretrained": ("path", hf_specdec.AutoModelForCausalLM.from_pretrained),
    "AutoDraftHead.from_pretrained": ("path", hf_specdec.AutoDraftHead.from_pretrained),
    "train_head": ("out", lambda path: train_head(build(FAMILIES["llama"]), print, None, path)),
    "load_prompts": ("paths", lambda path: bench.load_prompts([path])),
    "read_records": ("path", bench.read_records),
    "write_page": ("page", lambda path: bench.write_page(path, {}, [])),
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_what_is_no_path_is_named(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    field, call = FUNCTIONS[name]
    for value in (None, 3, True, b"file", ["file"], "", "a\0b"):
        with pytest.raises(ConfigError, match=f"`{field}` must be .*, but is ") as error:
            call(value)
        assert error.value.value == value
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("paths", ["prompts.txt", b"prompts.txt", Path("prompts.txt"), 3, None])
def test_one_path_is_no_list_of_paths(paths: Any) -> None:
    """The characters of a text would be paths, a slash among them."""
    with pytest.raises(ConfigError, match=r"`paths` must be a list of files and folders, .* Write \[path\]"):
        bench.load_prompts(paths)


LONG = "x" * 300


@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_name_that_is_too_long_is_named(name: str) -> None:
    field, call = FUNCTIONS[name]
    with pytest.raises(ConfigError, match=f"`{field}` must be .*, but is .*too long.*shorter"):
        call(LONG)


def test_an_output_of_too_long_a_name_is_refused_before_the_work(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="`--out` must be a file that can be written, but is .*too long"):
        check_output("--out", tmp_path / LONG)


@pytest.mark.parametrize("name", ["x" * 255, "\u00e9" * 127, "a.jsonl"], ids=["ASCII", "two bytes each", "short"])
def test_a_file_may_have_the_longest_name_that_there_is(tmp_path: Path, name: str) -> None:
    """The new file next to it, which takes its place, has a name of its own."""
    check_output("--out", tmp_path / name)
    with replacing(tmp_path / name) as temporary:
        temporary.write_text("text")
    assert [file.name for file in tmp_path.iterdir()] == [name]


@pytest.mark.parametrize("name", [np.array(["target"]), np.array([1, 2]), ["target"], None], ids=str)
def test_what_is_no_name_of_an_embedded_model_is_named(name: Any) -> None:
    with pytest.raises(ConfigError, match="`name` must be one of 'draft', 'head', 'smollm2-head', 'target', but is "):
        hf_specdec.embedded.path(name)


TARGET = hf_specdec.embedded.path("target")


@pytest.mark.parametrize(
    ("dtype", "remedy"),
    [("bfloat18", "Did you mean 'bfloat16'?"), ("fp16", "Short names"), ("half-ish", "Short names")],
)
def test_a_dtype_that_is_none_names_the_rule(dtype: str, remedy: str) -> None:
    with pytest.raises(ConfigError, match=f"`dtype` must be a torch.dtype, the name of one, or 'auto', .*{remedy}"):
        hf_specdec.AutoModelForCausalLM.from_pretrained(TARGET, dtype=dtype)


@pytest.mark.parametrize("options", [{"dtype": "float16"}, {"precision": "float16"}, {"precision": "fp16"}])
def test_a_dtype_may_be_torch_s_name(options: dict[str, str]) -> None:
    assert hf_specdec.AutoModelForCausalLM.from_pretrained(TARGET, **options).dtype == torch.float16


@pytest.mark.parametrize("path", ["./no/such", "/no/such", "my-modle"])
def test_a_path_that_is_not_there_may_be_meant_for_a_hub_name(path: str) -> None:
    with pytest.raises(CheckpointError, match="must be an existing folder.*hub"):
        hf_specdec.AutoModelForCausalLM.from_pretrained(path)


@pytest.mark.parametrize("kind", [transformers.Qwen2Config, transformers.GPT2Config, transformers.Gemma2Config])
def test_a_checkpoint_without_tokenizer_files_has_no_empty_tokenizer(tmp_path: Path, kind: Any) -> None:
    kind().save_pretrained(tmp_path)
    with pytest.raises(CheckpointError, match="Put the checkpoint's tokenizer files"):
        load_tokenizer(tmp_path)


def test_a_speech_model_s_remedy_is_the_class_that_loads_it(tmp_path: Path) -> None:
    transformers.WhisperConfig().save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match="AutoModelForSpeechSeq2Seq loads it"):
        hf_specdec.AutoModelForSeq2SeqLM.from_pretrained(tmp_path)
