"""`hf-specdec demo`: its mistakes are found before a model is loaded, and `demos/app.py` is the same command."""

import runpy
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

import hf_specdec
from hf_specdec import embedded
from hf_specdec.cli import app, demo
from hf_specdec.demo.settings import KNOBS

ROOT = Path(__file__).parents[2]


def test_without_gradio_the_install_line_is_the_hint(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.startswith("hf_specdec.demo.")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "gradio", None)
    done = CliRunner().invoke(app, ["demo"])
    assert done.exit_code == 2
    assert 'pip install "hf_specdec[demo]"' in done.stderr


def test_a_wrong_model_is_a_message() -> None:
    done = CliRunner().invoke(app, ["demo", "--model", "/nowhere/at/all"])
    assert done.exit_code == 2
    assert "error:" in done.stderr and "Traceback" not in done.output


def test_a_port_that_another_program_has_is_refused_before_the_model_is_loaded() -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = str(other.getsockname()[1])
        done = CliRunner().invoke(app, ["demo", "--port", port, "--model", "/nowhere/at/all"])
    assert done.exit_code == 2
    assert "`--port` must be a port that can be listened on" in " ".join(done.stderr.split())


@pytest.mark.at_most(1)
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_model_of_any_dtype_is_widened(precision: str) -> None:
    """Widened and checked in fp32, since half precision rounds logits by more than a wrong model would change them."""
    model = hf_specdec.AutoModelForCausalLM.from_pretrained(embedded.path("target"), precision=precision)
    large = demo._widened(model, "512x7")
    assert (large.dtype, large.config.hidden_size) == (model.dtype, 512)
    ids = torch.tensor([[5, 6, 7, 8]])
    assert large.generate(ids, max_new_tokens=4, spec_method="auto").shape == (1, 8)


@pytest.mark.parametrize("arguments", [["--dtype", "fp8"], ["--dtype", "int8"], ["--dtype", "nf4"]])
def test_quantised_weights_are_not_widened(arguments: list[str]) -> None:
    done = CliRunner().invoke(app, ["demo", "--widen", "512x7", *arguments])
    assert done.exit_code == 2
    assert "`--widen` must be left out with quantised weights" in " ".join(done.stderr.split())


@pytest.mark.wide
def test_ctrl_c_stops_the_race(tmp_path: Path) -> None:
    """At its next token, not when it is over."""
    gradio_client = pytest.importorskip("gradio_client", reason="the demo's page needs gradio")
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = str(free.getsockname()[1])
    command = [sys.executable, "-m", "hf_specdec", "demo", "--port", port, "--widen", "1024x16"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
        try:
            visitor = connected(f"http://127.0.0.1:{port}", gradio_client, process)
            knobs = [knob.default for knob in KNOBS]
            job = visitor.submit("def f(x):\n", ["auto"], 200, 0.0, 0, False, *knobs, api_name="/race")
            wait_until(lambda: "of 200 tokens" in str(job.outputs()), 60)
            process.send_signal(signal.SIGINT)
            process.wait(30)
        finally:
            process.kill()


def connected(address: str, gradio_client: Any, process: "subprocess.Popen[str]") -> Any:
    """A visitor, once the page is there."""
    for _ in range(120):
        assert process.poll() is None
        try:
            return gradio_client.Client(address, verbose=False)
        except Exception:
            time.sleep(1)
    raise AssertionError("no page")


def wait_until(is_so: Callable[[], bool], seconds: float) -> None:
    end = time.monotonic() + seconds
    while not is_so():
        assert time.monotonic() < end
        time.sleep(0.1)


@pytest.mark.wide
def test_the_folder_of_a_space_runs_the_command() -> None:
    done = subprocess.run(
        [sys.executable, str(ROOT / "demos" / "app.py"), "--help"], capture_output=True, text=True, cwd=ROOT, check=True
    )
    assert "--share" in done.stdout
    assert (ROOT / "demos" / "requirements.txt").read_text() == "hf_specdec[demo]\n"
    assert "sdk: gradio" in (ROOT / "demos" / "README.md").read_text()
    assert runpy.run_path(str(ROOT / "demos" / "app.py"))["app"] is app
