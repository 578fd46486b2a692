"""Ctrl-C in a process: what it leaves is printed, or stderr says that it came."""

import signal
import subprocess
import sys
import time

import pytest

from tests.cli.conftest import hearing_interrupts

SHORT = ("--max-new-tokens", "256", "--dtype", "fp32", "--threads", "1")


@pytest.mark.wide
@pytest.mark.parametrize(
    "words",
    [
        ("generate", "--compare", "--rounds", "500"),
        ("summarize",),
        ("generate", "x", "--json", "--spec-method", "plain", "--max-new-tokens", "2000"),
    ],
    ids=" ".join,
)
def test_a_process_says_what_ctrl_c_leaves(words: tuple[str, ...]) -> None:
    with hearing_interrupts():
        started = subprocess.Popen(
            (sys.executable, "-m", "hf_specdec", words[0], *SHORT, *words[1:]),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
    time.sleep(8.0)
    started.send_signal(signal.SIGINT)
    _, complaint = started.communicate(timeout=100)
    assert started.returncode == 130, complaint
    assert "interrupted" in complaint
