"""What cannot be loaded is named with its rule and remedy, not in the words of the library below."""

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

import hf_specdec
from hf_specdec import CheckpointError, ConfigError
from hf_specdec.loading.checkpoints.tokenizers import load_tokenizer

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
