"""`hf-specdec train`: one command from a file of prompts to a head that loads, and what it refuses."""

import errno
import json
from pathlib import Path
from typing import Any, NoReturn

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from hf_specdec import AutoDraftHead
from hf_specdec.errors import ConfigError
from hf_specdec.tools.cli import train
from hf_specdec.tools.train import work
from tests.cli.conftest import Run

QUICK = ("--num-texts", "128", "--prompt-tokens", "4", "--max-new-tokens", "4", "--epochs", "1", "--rollout-steps", "2")


def test_train_makes_a_head_from_a_file_of_prompts(run: Run, tmp_path: Path) -> None:
    prompts, out = tmp_path / "prompts.jsonl", tmp_path / "head"
    prompts.write_text("\n".join(json.dumps({"prompt": f"def f{i}(self):\n    return {i}"}) for i in range(20)))
    result = run("train", "--prompts", str(prompts), "--out", str(out), "--draft-vocab-size", "512", *QUICK, "--json")
    assert result.exit_code == 0, result.stderr
    report = json.loads(result.stdout)
    assert report["num_steps"] == 8
    assert [found["temperature"] for found in report["measured"]] == [0.0]
    assert "step 0 of at most 8, 0.0 minutes: held-out tokens per step" in result.stderr  # no loss before a step
    head = AutoDraftHead.from_pretrained(out)
    assert (head.config.hidden_size, head.config.draft_vocab_size, head.config.layer_ids) == (256, 512, (1, 3, 5))
    assert "held-out" in (out / "README.md").read_text().lower()


@pytest.mark.parametrize("is_slow", [False, True], ids=["quick", "slow"])
def test_a_target_in_bf16_on_a_cpu_that_computes_it_slowly_is_told(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_slow: bool
) -> None:
    monkeypatch.setattr(train, "computes_bf16", lambda device: not is_slow)
    monkeypatch.setattr(train, "train_draft", lambda target, *args, **kwargs: _stopped(target.dtype))
    stopped = {dtype: run("train", "--out", str(tmp_path), "--dtype", dtype) for dtype in ("bf16", "fp32")}
    assert ("--dtype fp32" in stopped["bf16"].stderr) == is_slow
    assert "--dtype fp32" not in stopped["fp32"].stderr


def _stopped(dtype: torch.dtype) -> NoReturn:
    raise ConfigError("out", "must not be written in this test", dtype, "It stops here.")


@pytest.mark.wide
def test_train_distils_a_draft_model(run: Run, tmp_path: Path) -> None:
    out = tmp_path / "draft"
    result = run("train", "--kind", "draft", "--draft-layers", "1", "--out", str(out), *QUICK, "--json")
    assert result.exit_code == 0, result.stderr
    assert json.loads(result.stdout)["num_steps"] == 8
    draft = AutoModelForCausalLM.from_pretrained(out)
    assert draft.config.num_hidden_layers == 1
    assert len(AutoTokenizer.from_pretrained(out)) > 256
    assert "held-out" in (out / "README.md").read_text().lower()


def test_train_makes_a_dspark_head(run: Run, tmp_path: Path) -> None:
    out = tmp_path / "head"
    shape = ("--layers", "1,3", "--draft-layers", "1", "--block-size", "5", "--markov-rank", "8")
    result = run("train", "--kind", "dflash", "--out", str(out), *shape, *QUICK, "--json")
    assert result.exit_code == 0, result.stderr
    assert json.loads(result.stdout)["num_steps"] == 8
    head: Any = AutoDraftHead.from_pretrained(out)
    assert (head.config.layer_ids, head.num_layers, head.num_drafted) == ((1, 3), 1, 5)


@pytest.mark.parametrize("kind", ["head", "dflash", "draft"])
def test_an_interrupted_training_says_how_to_continue(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    def interrupt(*args: Any, **kwargs: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("hf_specdec.tools.cli.train.train_draft", interrupt)
    result = run("train", "--kind", kind, "--out", str(tmp_path / "draft"))
    assert result.exit_code not in (0, 1, 2)
    assert f"interrupted: {tmp_path / 'draft'} keeps what was done; the same command continues" in result.stderr


@pytest.mark.parametrize(("size", "is_told"), [("4096", False), ("4097", True)])
def test_a_draft_vocabulary_beyond_the_target_s_is_pointed_out(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, size: str, is_told: bool
) -> None:
    def stop(*args: Any, **kwargs: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("hf_specdec.tools.cli.train.train_draft", stop)
    result = run("train", "--out", str(tmp_path / "draft"), "--draft-vocab-size", size)
    note = f"note: the target has 4096 tokens; the head drafts all of them, not {size}\n"
    assert (note in result.stderr) == is_told


def test_prompts_are_taken_from_text_files_and_folders(tmp_path: Path) -> None:
    from hf_specdec.tools.cli.train import _lines_of

    (tmp_path / "a.txt").write_text("one")
    (tmp_path / "below").mkdir()
    (tmp_path / "below" / "b.py").write_text("two")
    (tmp_path / "below" / "c.bin").write_bytes(b"\xff\xfe\x00")
    (tmp_path / "d.jsonl").write_text('"three"\n{"turns": ["four", "five"]}\n')
    assert [line.text for line in _lines_of(tmp_path)] == ["one", "two", "three", "four"]
    assert [line.text for line in _lines_of(tmp_path / "a.txt")] == ["one"]


@pytest.mark.parametrize(
    ("words", "field"),
    [
        (("--layers", "1,x"), "--layers"),
        (("--layers", "1,2,40"), "--layers"),
        (("--prompts", "/nowhere.txt"), "--prompts"),
        (("--num-texts", "3"), "--num-texts"),
        (("--minutes", "0"), "--minutes"),
        (("--learning-rate", "0"), "--learning-rate"),
        (("--epochs", "nan"), "--epochs"),
        (("--max-new-tokens", "0"), "--max-new-tokens"),
        (("--draft-layers", "2"), "--draft-layers"),
        (("--kind", "draft", "--layers", "1,2"), "--layers"),
        (("--block-size", "8"), "--block-size"),
        (("--kind", "dflash", "--head", "folder"), "--head"),
        (("--head", "folder"), "--head"),
        (("--kind", "draft", "--head", "folder"), "--head"),
        (("--kind", "dflash", "--layers", "0,2"), "--layers"),
        (("--kind", "dflash", "--block-size", "1"), "--block-size"),
        (("--kind", "dflash", "--markov-rank", "-1"), "--markov-rank"),
    ],
)
def test_what_cannot_be_trained_is_refused(run: Run, tmp_path: Path, words: tuple[str, ...], field: str) -> None:
    result = run("train", "--out", str(tmp_path / "head"), *words)
    assert result.exit_code == 2
    assert f"`{field}`" in result.stderr
    assert "hint:" in result.stderr or "Pass the folder or the hub name of a draft head." in result.stderr


@pytest.mark.parametrize(
    ("name", "content", "rule"),
    [
        ("none.jsonl", None, "must be an existing file"),
        ("empty.jsonl", b"\n", "must hold at least one line"),
        ("latin.jsonl", b'"\xe4"', "must be UTF-8 text"),
        ("none.txt", None, "must be an existing text file"),
        ("latin.txt", b"\xe4", "must be UTF-8 text"),
        ("binary.txt", b"a\0b", "must be UTF-8 text"),
    ],
)
def test_a_file_that_holds_no_prompts_is_an_error_of_its_option(
    run: Run, tmp_path: Path, name: str, content: bytes | None, rule: str
) -> None:
    prompts = tmp_path / name
    if content is not None:
        prompts.write_bytes(content)
    result = run("train", "--out", str(tmp_path / "head"), "--prompts", str(prompts))
    assert result.exit_code == 2
    assert f"error: `--prompts` {rule}, but is '{prompts}'." in result.stderr


def test_a_full_disk_is_an_error_of_out(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(path: Path) -> NoReturn:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(work, "replacing", full)
    out = str(tmp_path / "head")
    result = run("train", "--out", out, *QUICK)
    assert result.exit_code == 2
    assert f"error: `--out` must be a path that can be used, but is {out!r}.\nhint: No space left" in result.stderr


@pytest.mark.parametrize(
    ("line", "rule"),
    [
        ('{"prompt": "a\\ud800"}', "must be Unicode text, but character 1 is half of a pair"),
        (
            "[1, 2]",
            'must be a string, or an object with "prompt", "text", "messages", "turns", '
            '"instruction" or "question", the text not empty',
        ),
    ],
)
def test_a_line_that_is_no_prompt_is_named_with_its_number(run: Run, tmp_path: Path, line: str, rule: str) -> None:
    """Blank lines count."""
    (tmp_path / "p.jsonl").write_text(f'"one"\n\n{line}\n', encoding="utf-8")
    result = run("train", "--out", str(tmp_path / "head"), "--prompts", str(tmp_path / "p.jsonl"))
    assert result.exit_code == 2
    assert f"error: `p.jsonl:3` {rule}, but is {line!r}.\nhint: Correct the line, or take it out." in result.stderr


def test_bytes_that_are_no_utf8_are_named_with_their_line(run: Run, tmp_path: Path) -> None:
    (tmp_path / "p.jsonl").write_bytes(b'"one"\n"\xe4"\n')
    result = run("train", "--out", str(tmp_path / "head"), "--prompts", str(tmp_path / "p.jsonl"))
    assert "hint: Byte 7, in line 2, is none of UTF-8; iconv" in result.stderr


def test_a_byte_order_mark_is_no_part_of_a_prompt(tmp_path: Path) -> None:
    from hf_specdec.tools.cli.train import _lines_of

    (tmp_path / "a.txt").write_bytes(b"\xef\xbb\xbfone")
    for place in (tmp_path / "a.txt", tmp_path):
        assert [line.text for line in _lines_of(place)] == ["one"]
