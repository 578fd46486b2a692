"""`hf-specdec tune`, and `auto` on the command line: costs from a file, a memory from run to run."""

import json
from pathlib import Path
from typing import Any

import pytest

from hf_specdec import SpecMemory, embedded
from hf_specdec.tools.bench import tuning
from tests.cli.conftest import Run

QUICK = ("--dtype", "fp32", "--seconds", "0.3", "--context-length", "24")
SHORT = ("--dtype", "fp32", "--max-new-tokens", "16")
PROMPT = "def push(self, item):\n    self.items.append(item)\n\n\ndef pop(self):\n    return self.items."


def document(run: Run, *words: str) -> dict[str, Any]:
    result = run(*words, "--json")
    assert result.exit_code == 0, result.stderr
    parsed: dict[str, Any] = json.loads(result.stdout)
    return parsed


@pytest.fixture
def costs(run: Run, tmp_path: Path) -> Path:
    path = tmp_path / "costs.json"
    result = run("tune", "--out", str(path), *QUICK)
    assert result.exit_code == 0, result.stderr
    assert "tokens" in result.stdout
    assert f"wrote {path}" in " ".join(result.stderr.split("\n"))
    return path


@pytest.mark.parametrize("option", [(), ("--model",)])
def test_tune_measures_every_batch_size_and_says_so_in_json(run: Run, tmp_path: Path, option: tuple[str, ...]) -> None:
    path = tmp_path / "costs.json"
    found = document(
        run, "tune", *option, embedded.path("target"), "--out", str(path), *QUICK, *("--batch-size", "2") * 1
    )
    assert [curve["batch_size"] for curve in found["curves"]] == [2]
    points = found["curves"][0]["points"]
    assert points[0]["num_tokens"] == 1
    assert points[0]["ratio"] == 1.0
    assert len(points) > 2
    assert all(point["seconds"] > 0.0 for point in points)
    saved = json.loads(path.read_text())
    assert saved["facts"] == found["facts"]
    assert (saved["facts"]["dtype"], saved["facts"]["device"], saved["facts"]["context_length"]) == (
        "float32",
        "cpu",
        24,
    )
    assert saved["curves"].keys() == {"2"} and found["is_complete"]


def interrupt_at(monkeypatch: pytest.MonkeyPatch, batch_size: int) -> None:
    """Have the measurement of this batch size interrupted."""
    real = tuning.time_steps

    def time_steps(*args: Any, rows: int, **kwargs: Any) -> None:
        if rows == batch_size:
            raise KeyboardInterrupt
        real(*args, rows=rows, **kwargs)

    monkeypatch.setattr(tuning, "time_steps", time_steps)


def test_an_interrupt_keeps_the_batch_sizes_that_were_measured(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "costs.json"
    interrupt_at(monkeypatch, 2)
    result = run("tune", "--out", str(path), *QUICK, "--batch-size", "2", "--batch-size", "1", "--json")
    assert result.exit_code == 130
    assert "interrupted: what has been measured follows" in result.stderr
    found = json.loads(result.stdout)
    assert ([curve["batch_size"] for curve in found["curves"]], found["is_complete"]) == ([1], False)
    assert json.loads(path.read_text())["curves"].keys() == {"1"}


def test_an_interrupt_before_anything_was_measured_leaves_the_file(
    run: Run, costs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = costs.read_bytes()
    interrupt_at(monkeypatch, 1)
    result = run("tune", "--out", str(costs), *QUICK)
    assert (result.exit_code, result.stdout) == (130, "")
    assert result.stderr == "interrupted\n"
    assert costs.read_bytes() == before


def test_generate_begins_with_the_costs_of_the_file(run: Run, costs: Path) -> None:
    words = ("generate", PROMPT, *SHORT)
    plain = document(run, *words, "--spec-method", "none")
    found = document(run, *words, "--auto-config", json.dumps({"costs": str(costs)}))
    assert found["spec_method"] == "auto"
    assert found["token_ids"] == plain["token_ids"]
    assert found["spec_config"]["costs"] == str(costs)


@pytest.mark.wide
def test_costs_of_another_precision_are_an_error(run: Run, costs: Path) -> None:
    config = json.dumps({"costs": str(costs)})
    result = run("generate", PROMPT, "--dtype", "bf16", "--max-new-tokens", "4", "--auto-config", config)
    assert result.exit_code == 2
    assert "dtype" in result.stderr
    assert "hf-specdec tune" in result.stderr


@pytest.mark.parametrize(
    "words",
    [
        ("--out", "/nowhere/costs.json"),
        ("--out", "c.json", "--context-length", "100000", "--dtype", "fp32"),
        ("--out", "c.json", "--context-length", "24", "--dtype", "fp32", "--seconds", "1e-9"),
    ],
)
def test_tune_refuses_what_cannot_work(run: Run, words: tuple[str, ...]) -> None:
    result = run("tune", *words)
    assert result.exit_code == 2
    assert "error:" in result.stderr
    assert "hint:" in result.stderr
    assert not Path("c.json").exists()


def test_a_memory_goes_from_run_to_run(run: Run, tmp_path: Path) -> None:
    path = tmp_path / "memory"
    words = ("generate", PROMPT, *SHORT, "--spec-memory", str(path), "--auto-config", "{'num_nodes': 8}")
    first = document(run, *words)
    tokens = len(SpecMemory.load(path).pool)
    second = document(run, *words)
    assert first["spec_method"] == "auto"
    assert second["token_ids"] == first["token_ids"]
    assert second["spec_stats"]["num_accepted_tokens"] > first["spec_stats"]["num_accepted_tokens"]
    assert len(SpecMemory.load(path).pool) == 2 * tokens > 0


def test_a_file_of_prompts_fills_the_memory_and_may_be_started_again(run: Run, tmp_path: Path) -> None:
    prompts, out, path = tmp_path / "prompts.jsonl", tmp_path / "out.jsonl", tmp_path / "memory"
    prompts.write_text("".join(json.dumps(text) + "\n" for text in ("def f(x):", "class A:", "import os")))
    words = ("generate", "--prompts-file", str(prompts), "--out", str(out), *SHORT, "--spec-memory", str(path))
    first = run(*words)
    assert first.exit_code == 0, first.stderr
    lines, tokens = out.read_text(), len(SpecMemory.load(path).pool)
    assert tokens > 3 * 16
    again = run(*words)
    assert again.exit_code == 0, again.stderr
    assert out.read_text() == lines
    assert len(SpecMemory.load(path).pool) == tokens


def test_an_interrupted_run_keeps_its_memory(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "memory"

    def interrupt(*args: Any, **kwargs: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("hf_specdec.tools.cli.job.Job.run", interrupt)
    assert run("generate", PROMPT, *SHORT, "--spec-memory", str(path)).exit_code != 0
    assert SpecMemory.load(path).bounds == SpecMemory().bounds


@pytest.mark.parametrize("method", ["prompt_lookup", "none"])
def test_a_memory_without_auto_is_refused(run: Run, tmp_path: Path, method: str) -> None:
    result = run("generate", PROMPT, "--spec-method", method, "--spec-memory", str(tmp_path / "memory"))
    assert result.exit_code == 2
    assert "--spec-memory" in result.stderr


def test_a_file_that_is_no_memory_is_refused_and_left_alone(run: Run, tmp_path: Path) -> None:
    path = tmp_path / "memory"
    path.write_text("my notes")
    result = run("generate", PROMPT, *SHORT, "--spec-memory", str(path))
    assert result.exit_code == 2
    assert "`--spec-memory` must be a whole safetensors file" in result.stderr
    assert path.read_text() == "my notes"


@pytest.mark.wide
def test_auto_takes_a_draft_model(run: Run) -> None:
    words = ("generate", PROMPT, *SHORT, "--spec-method", "auto", "--auto-config", "{'num_nodes': 8}")
    alone = document(run, *words)
    drafted = document(run, *words, "--draft-model", embedded.path("draft"))
    assert alone["draft"] is None
    assert drafted["draft"]["model"] == embedded.path("draft")
    assert drafted["token_ids"] == alone["token_ids"]
    assert drafted["spec_stats"]["num_accepted_tokens"] > alone["spec_stats"]["num_accepted_tokens"]


def test_a_model_is_named_once(run: Run, tmp_path: Path) -> None:
    result = run("tune", "one", "--model", "other", "--out", str(tmp_path / "costs.json"))
    assert result.exit_code == 2
    assert "`--model` must be unset with the argument 'one', but is 'other'. Name the model once." in " ".join(
        result.stderr.replace("hint: ", "").split()
    )
