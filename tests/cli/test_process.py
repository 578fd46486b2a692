"""The commands as a process: module entry point, terminal, closed pipe."""

import json
import os
import pty
import runpy
import subprocess
import sys

import pytest

SHORT = ("generate", "x = 1\n", "--model", "embedded", "--max-new-tokens", "6", "--dtype", "fp32")
COMMAND = (sys.executable, "-m", "hf_specdec", *SHORT)


def test_python_m_runs_the_command_line(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", ["hf_specdec", *SHORT, "--json"])
    with pytest.raises(SystemExit) as ended:
        runpy.run_module("hf_specdec", run_name="__main__", alter_sys=True)
    assert not ended.value.code
    assert len(json.loads(capsys.readouterr().out)["token_ids"]) == 6


@pytest.mark.wide
def test_a_reader_that_leaves_early_causes_no_traceback() -> None:
    process = subprocess.Popen(
        COMMAND, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdout is not None and process.stderr is not None
    process.stdout.close()
    complaint = process.stderr.read()
    process.stderr.close()
    process.wait(timeout=120)
    assert "Traceback" not in complaint and "error:" not in complaint


@pytest.mark.wide
def test_on_a_terminal_the_text_streams_without_colour_if_asked() -> None:
    """`NO_COLOR` leaves no colour codes; the streamed text is the text that a pipe gets."""
    environment = {**os.environ, "NO_COLOR": "1", "TERM": "xterm"}
    piped = subprocess.run(COMMAND, capture_output=True, text=True, stdin=subprocess.DEVNULL, timeout=120)
    terminal, other = pty.openpty()
    try:
        done = subprocess.run(
            COMMAND, stdin=subprocess.DEVNULL, stdout=other, stderr=subprocess.PIPE, env=environment, timeout=120
        )
        shown = os.read(terminal, 65536).decode()
    finally:
        os.close(terminal)
        os.close(other)
    assert done.returncode == 0
    assert shown.replace("\r\n", "\n").strip() == piped.stdout.strip()
    assert b"\x1b[3" not in done.stderr
