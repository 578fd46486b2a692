"""`hf-specdec train`: one command from a file of prompts to a head that loads, and what it refuses."""

import json
from pathlib import Path
from typing import Any

import pytest

from hf_specdec import AutoDraftHead
from tests.cli.conftest import Run

QUICK = ("--num-texts", "16", "--max-new-tokens", "4", "--max-steps", "2", "--rollout-steps", "2", "--dtype", "fp32")


def test_train_makes_a_head_from_a_file_of_prompts(run: Run, tmp_path: Path) -> None:
    prompts, out = tmp_path / "prompts.jsonl", tmp_path / "head"
    prompts.write_text("\n".join(json.dumps({"prompt": f"def f{i}(self):\n    return {i}"}) for i in range(20)))
    shape = ("--draft-vocab-size", "512", "--layer-ids", "1", "--layer-ids", "3", "--layer-ids", "5")
    others = ("--training-arguments", '{"eval_steps": 1}', "--per-device-train-batch-size", "4", "--json")
    result = run("train", "--prompts", str(prompts), "--out", str(out), *shape, *QUICK, *others)
    assert result.exit_code == 0, result.stderr
    report = json.loads(result.stdout)
    assert (report["num_steps"], len(report["accepted"])) == (2, 2)
    head: Any = AutoDraftHead.from_pretrained(out)
    assert (head.config.hidden_size, head.config.draft_vocab_size, head.config.layer_ids) == (256, 512, (1, 3, 5))


def test_an_interrupted_training_says_how_to_continue(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(*args: Any, **kwargs: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("hf_specdec.tools.cli.train.train_head", interrupt)
    result = run("train", "--out", str(tmp_path / "head"))
    assert result.exit_code not in (0, 1, 2)
    assert f"interrupted: {tmp_path / 'head'} keeps what was done; the same command continues" in result.stderr


@pytest.mark.parametrize(
    ("words", "rule"),
    [
        (("--layer-ids", "40"), "from 0 to 6, the target's number of layers"),
        (("--prompts", "/nowhere.jsonl"), "must be an existing file"),
        (("--num-texts", "1"), "must be"),
        (("--training-arguments", "3"), "must be a JSON object"),
        (("--training-arguments", '{"epochs": 3}'), "must be what transformers.TrainingArguments takes"),
    ],
)
def test_what_cannot_be_trained_is_refused(run: Run, tmp_path: Path, words: tuple[str, ...], rule: str) -> None:
    result = run("train", "--out", str(tmp_path / "head"), *words)
    assert result.exit_code == 2
    assert rule in result.stderr


@pytest.mark.parametrize("line", ["[1, 2]", "{broken", '{"prompt": "a\\ud800"}', "3"])
def test_a_line_that_is_no_prompt_chat_or_text_is_shown(run: Run, tmp_path: Path, line: str) -> None:
    (tmp_path / "p.jsonl").write_text(f'"one"\n\n{line}\n', encoding="utf-8")
    result = run("train", "--out", str(tmp_path / "head"), "--prompts", str(tmp_path / "p.jsonl"))
    assert result.exit_code == 2
    assert "must " in result.stderr
    assert "hint: Correct it, or take it out." in result.stderr
