"""`hf-specdec demo`: its mistakes are found before a model is loaded, and `demos/app.py` is the same command."""

import runpy
import socket
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from typer.testing import CliRunner

from hf_specdec.tools.cli import app
from hf_specdec.tools.demo.runner import Racer

ROOT = Path(__file__).parents[2]


def test_without_gradio_the_install_line_is_the_hint(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.startswith("hf_specdec.tools.demo.")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "gradio", None)
    done = CliRunner().invoke(app, ["demo"])
    assert done.exit_code == 2
    assert 'pip install "hf_specdec[demo]"' in done.stderr


@pytest.mark.parametrize("command", ["demo", "serve"])
def test_a_port_that_another_program_has_is_refused_before_the_model_is_loaded(command: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = str(other.getsockname()[1])
        done = CliRunner().invoke(app, [command, "--port", port, "--model", "nowhere/at-all"])
    assert done.exit_code == 2
    assert f"`port` must be free on 127.0.0.1, but is {port}." in done.stderr


@pytest.mark.parametrize("raises", [False, True])
def test_the_page_is_closed_at_the_end(monkeypatch: pytest.MonkeyPatch, raises: bool) -> None:
    """Gradio returns at Ctrl-C; a race that goes on keeps the process alive, up to `--max-seconds`."""
    page = pytest.importorskip("hf_specdec.tools.demo.page", reason="the demo's page needs gradio")
    closed: list[bool] = []

    def launch(**_: Any) -> None:
        assert not closed
        if raises:
            raise KeyboardInterrupt

    monkeypatch.setattr(page, "Page", lambda _: SimpleNamespace(close=lambda: closed.append(True), launch=launch))
    monkeypatch.setattr(Racer, "warm_up", lambda _: None)
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = str(free.getsockname()[1])
    CliRunner().invoke(app, ["demo", "--model", "embedded", "--port", port])
    assert closed == [True]


@pytest.mark.wide
def test_the_folder_of_a_space_runs_the_command() -> None:
    done = subprocess.run(
        [sys.executable, str(ROOT / "demos" / "app.py"), "--help"], capture_output=True, text=True, cwd=ROOT, check=True
    )
    assert "--share" in done.stdout
    assert (ROOT / "demos" / "requirements.txt").read_text() == "hf_specdec[demo,gguf,models]\n"
    assert "sdk: gradio" in (ROOT / "demos" / "README.md").read_text()
    assert runpy.run_path(str(ROOT / "demos" / "app.py"))["app"] is app
