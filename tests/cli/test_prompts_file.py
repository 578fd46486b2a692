"""Jobs over a file of prompts: every prompt once, whatever happens on the way."""

import json
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from hf_specdec.tools.cli import prompts_file as prompts_file_module
from tests.cli.conftest import Run
from tests.distributed.launch import launch
from tests.helpers.cover import wide_but

OPTIONS = ("--max-new-tokens", "12", "--dtype", "fp32", "--threads", "1", "--spec-method", "prompt_lookup")
PROMPTS = [f"def f{number}(x, y):\n    return x + {number}\n\ndef g{number}(x" for number in range(24)]


@pytest.fixture
def prompts_file(tmp_path: Path) -> Path:
    """In all the forms that a line may have, one that has none of them among them."""
    forms: list[Any] = []
    for number, prompt in enumerate(PROMPTS):
        key = (None, "prompt", "question", "text")[number % 4]
        forms.append(prompt if key is None else {key: prompt, "id": number})
    forms[5] = {"turns": [PROMPTS[5], "and then?"]}
    file = tmp_path / "prompts.jsonl"
    file.write_text("\n".join(json.dumps(form) for form in forms) + '\n\n{"nothing": "here"}\n', encoding="utf-8")
    return file


def lines_of(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text("utf-8").splitlines()]


def test_every_prompt_has_its_line_in_order(run: Run, prompts_file: Path, tmp_path: Path) -> None:
    out = tmp_path / "out.jsonl"
    result = run("generate", "--prompts-file", str(prompts_file), "--out", str(out), "--batch-size", "5", *OPTIONS)
    assert result.exit_code == 1, "one line was no prompt"
    lines = lines_of(out)
    assert [line["index"] for line in lines] == list(range(len(PROMPTS) + 1))
    assert [line["prompt"] for line in lines[:-1]] == PROMPTS
    assert "must be a string" in lines[-1]["error"]
    for number in (0, 7):
        alone = run("generate", PROMPTS[number], *OPTIONS, "--json")
        assert lines[number]["token_ids"] == json.loads(alone.stdout)["token_ids"]
        assert lines[number]["text"] == json.loads(alone.stdout)["text"]


def test_a_finished_job_is_not_done_again(run: Run, prompts_file: Path, tmp_path: Path) -> None:
    out = tmp_path / "out.jsonl"
    words = ("generate", "--prompts-file", str(prompts_file), "--out", str(out), *OPTIONS, "--json")
    run(*words)
    before = out.read_bytes()
    again = run(*words)
    assert out.read_bytes() == before
    assert json.loads(again.stdout)["num_prompts"] == len(PROMPTS) + 1


def test_a_line_that_was_corrected_is_decoded_and_one_that_was_added_too(run: Run, tmp_path: Path) -> None:
    """What is done stays; a prompt whose text is there must be the same."""
    prompts, out = tmp_path / "p.jsonl", tmp_path / "out.jsonl"
    words = ("generate", "--prompts-file", str(prompts), "--out", str(out), *OPTIONS)
    prompts.write_text('"a = 1"\n\n{"foo": 1}\n"b = 2"\n')
    failed = run(*words)
    assert failed.exit_code == 1
    assert 'prompt 1: line 3 must be a string, or an object with "prompt"' in failed.stderr
    assert """but is '{"foo": 1}'""" in failed.stderr
    before = lines_of(out)
    prompts.write_text('"a = 1"\n\n{"prompt": "c = 3"}\n"b = 2"\n"d = 4"\n')
    assert run(*words).exit_code == 0
    after = lines_of(out)
    assert [line["prompt"] for line in after] == ["a = 1", "c = 3", "b = 2", "d = 4"]
    assert not [line for line in after if "error" in line]
    assert [after[0], after[2]] == [before[0], before[2]]
    content = out.read_bytes()
    prompts.write_text('"a = 1"\n"x = 3"\n"b = 2"\n"d = 4"\n')
    refused = run(*words)
    assert refused.exit_code == 2
    assert "Its text 1 follows another prompt." in refused.stderr
    assert out.read_bytes() == content


def test_a_line_that_lacked_its_quotes_is_decoded_once_it_has_them(run: Run, tmp_path: Path) -> None:
    prompts, out = tmp_path / "p.jsonl", tmp_path / "out.jsonl"
    words = ("generate", "--prompts-file", str(prompts), "--out", str(out), *OPTIONS)
    prompts.write_text('def f(x):\n"a = 1"\n')
    assert run(*words).exit_code == 1
    failed, good = lines_of(out)
    assert (failed["line"], "prompt" in failed) == ("def f(x):", False)
    prompts.write_text('"def f(x):"\n"a = 1"\n')
    assert run(*words).exit_code == 0
    after = lines_of(out)
    assert [line["prompt"] for line in after] == ["def f(x):", "a = 1"]
    assert after[1] == good and "error" not in after[0]


@pytest.mark.wide
@pytest.mark.parametrize(
    "change", wide_but([("--seed", "4")], [("--max-new-tokens", "13"), ("--seed", "4"), ("--spec-method", "plain")])
)
def test_an_output_of_another_job_is_refused_and_left_alone(
    run: Run, prompts_file: Path, tmp_path: Path, change: tuple[str, str]
) -> None:
    out = tmp_path / "out.jsonl"
    words = ("generate", "--prompts-file", str(prompts_file), "--out", str(out), *OPTIONS)
    run(*words)
    before = out.read_bytes()
    refused = run(*words, *change)
    assert refused.exit_code == 2
    assert "same job" in refused.stderr
    assert out.read_bytes() == before


def test_an_interrupted_job_says_how_to_continue(
    run: Run, prompts_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out.jsonl"
    words = ("generate", "--prompts-file", str(prompts_file), "--out", str(out), *OPTIONS)
    append = prompts_file_module.JobFile.append

    def interrupted(file: prompts_file_module.JobFile, line: dict[str, Any]) -> None:
        append(file, line)
        if out.read_bytes().count(b'"index"') == 5:
            raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(prompts_file_module.JobFile, "append", interrupted)
        result = run(*words)
    assert result.exit_code not in (0, 1, 2)
    assert f"interrupted: {out} keeps the results so far; the same command continues" in result.stderr
    run(*words)
    assert [line["index"] for line in lines_of(out)] == list(range(len(PROMPTS) + 1))


@pytest.mark.wide
@pytest.mark.parametrize("seed", [0, 1])
def test_a_killed_job_goes_on_and_ends_the_same(run: Run, prompts_file: Path, tmp_path: Path, seed: int) -> None:
    """No line lost, none twice, equal to the uninterrupted run."""
    whole, out = tmp_path / "whole.jsonl", tmp_path / "out.jsonl"
    words = ["generate", "--prompts-file", str(prompts_file), "--batch-size", "3", *OPTIONS, "--do-sample"]
    run(*words, "--out", str(whole))
    rng = random.Random(seed)
    for _ in range(2):
        process = subprocess.Popen(
            [sys.executable, "-m", "hf_specdec", *words, "--out", str(out)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        at_least = rng.randrange(2, 12)
        deadline = time.monotonic() + 120
        while process.poll() is None and time.monotonic() < deadline:
            if out.exists() and out.read_bytes().count(b'"index"') >= at_least:
                break
            time.sleep(0.002)
        process.send_signal(signal.SIGKILL)
        process.wait()
    with out.open("ab") as file:
        file.write(b'{"index": 3, "prompt": "cut o')  # a write that was cut off
    result = run(*words, "--out", str(out))
    assert result.exit_code == 1
    assert lines_of(out) == lines_of(whole)


@pytest.mark.wide
def test_processes_share_a_job(run: Run, prompts_file: Path, tmp_path: Path) -> None:
    """Each takes its share and nothing else, one output, equal to one process's."""
    whole, out = tmp_path / "whole.jsonl", tmp_path / "out.jsonl"
    words = ["generate", "--prompts-file", str(prompts_file), *OPTIONS, "--do-sample", "--seed", "3", "--json"]
    run(*words, "--out", str(whole))
    script = tmp_path / "watched.py"
    script.write_text(
        f"""
import os
from hf_specdec.tools.cli import app
from hf_specdec.tools.cli.job_file import JobFile

append = JobFile.append
def watched(self, line):
    with open({str(tmp_path)!r} + "/of_" + os.environ["RANK"], "a") as file:
        file.write(str(line["index"]) + " ")
    append(self, line)
JobFile.append = watched
app()
"""
    )
    done = launch(str(script), *words, "--out", str(out), timeout=300)
    assert out.exists(), done.stderr
    assert lines_of(out) == lines_of(whole)
    shares = [set(map(int, (tmp_path / f"of_{rank}").read_text().split())) for rank in range(2)]
    assert shares == [set(range(0, 25, 2)), set(range(1, 25, 2))]
    assert json.loads(done.stdout)["num_prompts"] == 25  # one document, of the first process
    assert "destroy_process_group" not in done.stderr


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--out", "x.jsonl"), "--prompts-file"),
        (("--prompts-file", "x.jsonl"), "--out"),
        (("--prompts-file", "missing.jsonl", "--out", "y.jsonl"), "existing file"),
        (("a prompt", "--prompts-file", "x.jsonl", "--out", "y.jsonl"), "left out"),
        (("--compare", "--prompts-file", "x.jsonl", "--out", "y.jsonl"), "bench"),
    ],
)
def test_options_that_contradict_one_another(run: Run, words: tuple[str, ...], message: str) -> None:
    result = run("generate", *words)
    assert result.exit_code == 2
    assert message in result.stderr


def test_failed_prompts_say_why_and_are_tried_again_if_asked(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other prompts' lines stay, and the file ends as one that never failed."""
    prompts, out, whole = tmp_path / "prompts.jsonl", tmp_path / "out.jsonl", tmp_path / "whole.jsonl"
    prompts.write_text("".join(json.dumps(prompt) + "\n" for prompt in PROMPTS[:3]))
    words = ("generate", "--prompts-file", str(prompts), *OPTIONS)
    assert run(*words, "--out", str(whole)).exit_code == 0
    real = prompts_file_module._results

    def failing(job: Any, texts: list[Any], todo: list[int]) -> Any:
        for line in real(job, texts, todo):
            yield {**line, "error": "no room"} if line["index"] == 1 else line

    with monkeypatch.context() as patch:
        patch.setattr(prompts_file_module, "_results", failing)
        first = run(*words, "--out", str(out))
    assert first.exit_code == 1
    assert "prompt 1: no room" in first.stderr
    assert "--retry-failed" in first.stderr
    assert run(*words, "--out", str(out)).exit_code == 1, "without the option what failed stays"
    again = run(*words, "--out", str(out), "--retry-failed", "--json")
    assert again.exit_code == 0
    assert json.loads(again.stdout)["failures"] == {}
    assert lines_of(out) == lines_of(whole)
