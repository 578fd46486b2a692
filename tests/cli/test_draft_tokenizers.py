"""A draft model's folder with a tokenizer of its own: every command loads it and has drafts translated."""

import json
from pathlib import Path
from typing import Any

import pytest

import hf_specdec
from hf_specdec import embedded
from hf_specdec.loading.checkpoints.tokenizers import load_foreign_tokenizer
from hf_specdec.tools.bench.loaded_model import load_model
from hf_specdec.tools.bench.rows import row
from hf_specdec.tools.cli.options import LoadOptions, MethodOptions
from hf_specdec.tools.serve.protocol import CompletionRequest
from hf_specdec.tools.serve.requests import RequestReader
from tests.bench.conftest import tiny_llama
from tests.cli.conftest import Run
from tests.helpers.tokenizers import save_foreign_draft

TEXT = "def add(a, b):\n    return a + b\n\n\ndef sub(a, b):\n    return a - b\n"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_foreign_draft(tmp_path_factory.mktemp("draft"), [TEXT])


def test_generate_has_the_drafts_translated(run: Run, folder: str, tmp_path: Path) -> None:
    words = ("generate", "--dtype", "fp32", "--max-new-tokens", "12", "--json", "--draft-model", folder)
    told = ("--spec-config", '{"confidence_threshold": 0.0}')
    plain = run("generate", TEXT, "--dtype", "fp32", "--max-new-tokens", "12", "--json", "--spec-method", "none")
    ours = run(*words, *told, TEXT)
    assert ours.exit_code == 0, ours.stderr
    found = json.loads(ours.stdout)
    assert found["token_ids"] == json.loads(plain.stdout)["token_ids"]
    assert found["spec_stats"]["num_draft_tokens"] > 0
    assert found["spec_stats"]["plain_reason"] is None
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text(json.dumps(TEXT) + "\n")
    job = run(*words, *told, "--prompts-file", str(prompts), "--out", str(tmp_path / "out.jsonl"))
    assert json.loads(job.stdout)["num_failed"] == 0, job.stdout


def test_the_options_of_a_method_bring_both_tokenizers(folder: str) -> None:
    """What generate, chat, serve and summarize pass on."""
    target = LoadOptions().load(None, "fp32")
    method, config = (chosen := MethodOptions(draft_model=folder)).read(None)
    how = chosen.arguments(method, config, "fp32", target)
    assert how["tokenizer"] is target.tokenizer
    assert len(how["assistant_tokenizer"]) <= 300
    own = MethodOptions(draft_model=embedded.path("draft"))
    assert "assistant_tokenizer" not in own.arguments(*own.read(None), "fp32", target)
    auto = MethodOptions(spec_method="auto", draft_model=folder)
    assert len(auto.arguments(*auto.read(None), "fp32", target)["assistant_tokenizer"]) <= 300


def test_a_server_translates(folder: str) -> None:
    target = LoadOptions().load(None, "fp32")
    foreign, draft = load_foreign_tokenizer(folder, target.tokenizer), tiny_llama(300)
    reader = RequestReader(
        target.model, target.tokenizer, "m", "draft_model", None, 8, draft_model=draft, draft_tokenizer=foreign
    )
    asked = {"model": "m", "prompt": TEXT}
    assert reader.read(CompletionRequest(**asked))["assistant_tokenizer"] is foreign
    assert reader.read(CompletionRequest(**asked, spec_method="auto"))["assistant_tokenizer"] is foreign
    assert "assistant_model" not in reader.read(CompletionRequest(**asked, spec_method="prompt_lookup"))


def test_rows_of_the_benchmark_have_both_tokenizers(folder: str) -> None:
    loaded = load_model(None, dtype="fp32", device="cpu", assistant=folder)
    for name in ("draft_model", "auto+draft_model", "transformers:assistant"):
        assert row(name, loaded).arguments(None)["assistant_tokenizer"] is loaded.assistant_tokenizer


def test_a_folder_without_a_tokenizer_has_the_targets(folder: str, tokenizer: Any, tmp_path: Path) -> None:
    tiny_llama(300).save_pretrained(tmp_path)
    assert load_foreign_tokenizer(tmp_path, tokenizer) is None
    assert load_foreign_tokenizer(embedded.path("draft"), tokenizer) is None
    (tmp_path / "tokenizer_config.json").write_text("{")
    with pytest.raises(hf_specdec.CheckpointError, match="tokenizer"):
        load_foreign_tokenizer(tmp_path, tokenizer)


@pytest.mark.parametrize("draft", ["head", "foreign"])
def test_info_says_how_a_draft_goes_with_the_target(run: Run, folder: str, draft: str) -> None:
    path = embedded.path("head") if draft == "head" else folder
    result = run("info", "--draft-model", path, "--json")
    assert result.exit_code == 0, result.stderr
    found = json.loads(result.stdout)
    assert found["pair"]["goes together"] is True
    if draft == "head":
        assert found["draft head"]["methods"] == ["eagle3", "auto"]
        assert len(found["pair"]["hidden states"]) == 3
    else:
        assert "translated" in found["pair"]["reason"]
