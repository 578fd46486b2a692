"""Options and surroundings that cannot work: one line with field, rule, value and remedy, and exit code 2."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

import hf_specdec
from hf_specdec import embedded
from hf_specdec.errors import ConfigError
from hf_specdec.methods.auto.recycled_logits import key_of
from hf_specdec.tools.cli.memory import MemoryOnDisk
from tests.cli.conftest import Run

COMMAND = (sys.executable, "-m", "hf_specdec")
SHORT = ("generate", "x = 1\n", "--max-new-tokens", "4", "--dtype", "fp32", "--threads", "1")
NO_GPU = pytest.mark.skipif(torch.accelerator.is_available(), reason="there is a GPU here")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["generate", "x", "--threads", "100000"], "`--threads` must be at most"),
        (["bench", "--threads", "100000"], "`--threads` must be at most"),
        (["generate", "x", "--do-sample", "--seed", str(1 << 64)], "`--seed` must be 0 to"),
        (["generate", "x", "--do-sample", "--seed", "-1"], "`--seed` must be 0 to"),
        (["bench", "--seed", str(1 << 64)], "`--seed` must be 0 to"),
        (["bench", "--temperature", "0"], "--no-do-sample measures greedy rows alone."),
        (["bench", "--prompt-lookup-config", "x"], "`--prompt-lookup-config` must be a list or dict"),
        (["chat", "--seed", str(1 << 64)], "`--seed` must be 0 to"),
        (["generate", "x\udce9y"], "`PROMPT` must be Unicode text, without bytes that are no UTF-8"),
        (["generate", "x", "--spec-memory", "/dev/null"], "`--spec-memory` must be a regular file"),
        (["generate", "x", "--spec-config", "[" * 100_000], "`--spec-config` must be"),
        (["generate", "x", "--retry-failed"], "`--retry-failed` must come with --prompts-file"),
    ],
    ids=lambda value: " ".join(value)[:50].encode("ascii", "replace").decode() if isinstance(value, list) else "",
)
def test_a_value_that_cannot_work_is_one_line(run: Run, words: list[str], message: str) -> None:
    """Before a model is loaded, so that nothing is lost but the words."""
    result = run(*words)
    assert result.exit_code == 2, (result.exit_code, result.exception, result.stderr)
    assert message in result.stderr
    assert result.stderr.count("\n") <= 2


@NO_GPU
@pytest.mark.parametrize(
    "words",
    [
        ["generate", "x", "--device-map", "cuda"],
        ["generate", "x", "--device-map", '{"model": "cuda:3", "lm_head": "cpu"}'],
        ["bench", "--device", "cuda"],
        ["info", "--device-map", "cuda:1"],
    ],
    ids=" ".join,
)
def test_a_device_that_is_not_here_is_named(run: Run, words: list[str]) -> None:
    result = run(*words)
    assert result.exit_code == 2, (result.exit_code, result.exception)
    assert "must be a device that is here (cpu)" in result.stderr


@pytest.mark.parametrize("content", [None, b"{", b'{"version": "1.0"}'], ids=["missing", "cut off", "incomplete"])
def test_a_tokenizer_that_cannot_be_loaded_is_named(run: Run, tmp_path: Path, content: bytes | None) -> None:
    folder = tmp_path / "model"
    shutil.copytree(embedded.path("target"), folder, ignore=shutil.ignore_patterns("tokenizer*"))
    if content is not None:
        (folder / "tokenizer.json").write_bytes(content)
        shutil.copy(Path(embedded.path("target")) / "tokenizer_config.json", folder)
    result = run("generate", "x", "--model", str(folder))
    assert result.exit_code == 2, (result.exit_code, result.exception)
    assert "error: `tokenizer` must be one that transformers can load" in result.stderr


def process(*words: str, redirect: str) -> subprocess.CompletedProcess[str]:
    line = " ".join(f"'{word}'" for word in (*COMMAND, *words))
    return subprocess.run(["sh", "-c", f"{line} {redirect}"], capture_output=True, text=True, timeout=200)


@pytest.mark.wide
def test_a_closed_stdout_is_said_and_nothing_is_computed() -> None:
    done = process(*SHORT, redirect=">&-")
    assert done.returncode == 2
    assert done.stderr.splitlines()[0] == "error: `stdout` must be open, but is closed."


@pytest.mark.wide
def test_a_full_stdout_is_an_error() -> None:
    done = process(*SHORT, redirect="> /dev/full")
    assert done.returncode == 2, done.stderr
    assert "error: " in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.wide
def test_a_closed_stdin_gives_no_prompt() -> None:
    done = process("generate", "-", redirect="<&-")
    assert done.returncode == 2
    assert "error: `PROMPT` must be text where stdin is closed" in done.stderr


@pytest.mark.wide
def test_a_prompt_on_stdin_that_is_no_text_is_an_error() -> None:
    command = [*COMMAND, "generate", "-"]
    environment = {**os.environ, "PYTHONIOENCODING": "utf-8:strict"}
    done = subprocess.run(command, input=b"caf\xe9", capture_output=True, timeout=200, env=environment)
    assert done.returncode == 2
    assert b"error: `PROMPT` must be UTF-8 text on stdin" in done.stderr


def memory_of(*texts: list[int]) -> hf_specdec.SpecMemory:
    memory = hf_specdec.SpecMemory(1000, 1000)
    for text in texts:
        memory.pool.add(text)
    return memory


def test_a_memory_that_two_commands_use_holds_what_both_learned(tmp_path: Path) -> None:
    path = tmp_path / "memory.safetensors"
    memory_of([1, 2, 3]).save(path)
    first, second = MemoryOnDisk(path), MemoryOnDisk(path)
    for kept, text in ((first, [4, 5, 6]), (second, [7, 8, 9])):
        assert kept.memory is not None
        kept.memory.pool.add(text)
        key = (text[0], text[1], text[2])
        kept.memory.recycled.put(key, ((1,), (2.0,)))
        kept.save(kept.memory)
    found = hf_specdec.SpecMemory.load(path)
    assert sorted(found.pool.texts()) == [(1, 2, 3), (4, 5, 6), (7, 8, 9)]
    kept_entries = [found.recycled.get(key_of(key)) for key in ((4, 5, 6), (7, 8, 9))]
    assert all(entry is not None and list(entry[0]) == [1] for entry in kept_entries)


def test_a_memory_file_that_is_none_is_refused_before_the_work(tmp_path: Path) -> None:
    (tmp_path / "notes.md").write_text("mine")
    with pytest.raises(ConfigError, match="spec_memory"):
        MemoryOnDisk(tmp_path / "notes.md")
    assert (tmp_path / "notes.md").read_text() == "mine"


@pytest.mark.wide
def test_a_memory_is_saved_when_the_command_is_terminated(tmp_path: Path) -> None:
    """By SIGTERM, as a scheduler ends a job; the file of results stays one that the next run goes on with."""
    memory, out, prompts = tmp_path / "memory.safetensors", tmp_path / "out.jsonl", tmp_path / "p.jsonl"
    prompts.write_text("".join(f'"def f{number}(x):"\n' for number in range(400)))
    words = ["generate", "--prompts-file", str(prompts), "--out", str(out), "--spec-memory", str(memory)]
    started = subprocess.Popen([*COMMAND, *words, "--max-new-tokens", "8"], stderr=subprocess.PIPE, text=True)
    deadline = time.monotonic() + 150
    while started.poll() is None and time.monotonic() < deadline and not (out.exists() and out.stat().st_size):
        time.sleep(0.05)
    started.send_signal(signal.SIGTERM)
    _, complaint = started.communicate(timeout=100)
    assert started.returncode == 128 + signal.SIGTERM, complaint
    assert len(hf_specdec.SpecMemory.load(memory).pool.texts()) >= 1
    assert all(json.loads(line)["text"] for line in out.read_text().splitlines())
