"""`hf-specdec serve`: what it hands to the server, and what it says."""

import contextlib
import os
import signal
import socket
import sys
import threading
from pathlib import Path
from typing import Any

import openai
import pytest
import uvicorn
from transformers import AutoTokenizer

import hf_specdec
from hf_specdec.api.many_prompts.shared_batch import SharedBatch
from tests.cli.conftest import Run

PROMPT = "def saved(items):\n    return "


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What uvicorn would run, and how; the reader of its requests."""
    from hf_specdec.tools.serve import app

    settings: dict[str, Any] = {}

    def build_app(batch: SharedBatch, reader: Any, *, api_keys: list[str]) -> str:
        settings.update({name: batch._options[name] for name in ("spec_method", "spec_config")})
        batch.close()
        settings.update(reader=reader, api_keys=api_keys)
        return "app"

    monkeypatch.setattr(app, "build_app", build_app)
    monkeypatch.setattr(uvicorn, "run", lambda app, **options: settings.update(options))
    return settings


def test_it_listens_on_this_machine_alone(run: Run, served: dict[str, Any]) -> None:
    result = run("serve", "--port", "8123", "--shutdown-timeout", "5", "--limit-concurrency", "9")
    assert result.exit_code == 0, result.stderr
    assert (served["host"], served["port"], served["api_keys"]) == ("127.0.0.1", 8123, [])
    assert (served["timeout_graceful_shutdown"], served["limit_concurrency"]) == (5, 9)
    assert "--api-key" not in result.stderr
    shown = "serving embedded at http://127.0.0.1:8123/v1; for example:\n  curl http://127.0.0.1:8123/v1/completions"
    assert shown in result.stderr


@pytest.mark.parametrize(("words", "is_warned"), [((), True), (("--api-key", "secret"), False)])
def test_an_open_address_without_a_key_is_pointed_out(
    run: Run, served: dict[str, Any], words: tuple[str, ...], is_warned: bool
) -> None:
    result = run("serve", "--host", "0.0.0.0", *words)
    assert result.exit_code == 0, result.stderr
    assert ("asks for a key" in result.stderr) == is_warned


@pytest.mark.parametrize("key", ["", "  "])
def test_a_key_that_every_request_would_carry_is_refused(run: Run, served: dict[str, Any], key: str) -> None:
    """As `--api-key "$KEY"` gives it where the variable is not set."""
    result = run("serve", "--api-key", key)
    assert result.exit_code == 2
    assert "`api_key` must hold a key" in " ".join(result.stderr.split())
    assert not served


def test_a_configuration_of_the_command_is_that_of_requests(run: Run, served: dict[str, Any]) -> None:
    assert run("serve", "--lookahead-config=[7,5,7]").exit_code == 0
    assert (served["spec_method"], served["spec_config"].window_size) == ("lookahead", 7)


@pytest.mark.parametrize("package", ["fastapi", "uvicorn", "openai", "prometheus_client"])
def test_without_the_extra_the_install_line_is_given(run: Run, monkeypatch: pytest.MonkeyPatch, package: str) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    result = run("serve")
    assert result.exit_code == 2
    assert 'pip install "hf_specdec[serve]"' in result.stderr


def ask_and_end(port: int, answers: list[str], has_ended: threading.Event) -> None:
    """One request once the server is up, then SIGTERM to this process, whose main thread runs the server."""
    with openai.OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="none", max_retries=0) as client:
        while not answers and not has_ended.wait(0.05):
            with contextlib.suppress(openai.APIConnectionError):
                done = client.completions.create(model="embedded", prompt=PROMPT, max_tokens=8, temperature=0)
                answers.append(done.choices[0].text)
    if answers:
        os.kill(os.getpid(), signal.SIGTERM)


def serve_once(run: Run, *words: str) -> str:
    """Serve one request; returns its answer."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    answers: list[str] = []
    has_ended = threading.Event()
    client = threading.Thread(target=ask_and_end, args=(port, answers, has_ended))
    client.start()
    result = run("serve", "--port", str(port), "--dtype", "fp32", *words)
    has_ended.set()
    client.join()
    assert result.exit_code == 128 + signal.SIGTERM, result.stderr
    (answer,) = answers
    return answer


def test_what_clients_wrote_is_kept_over_a_restart(run: Run, tmp_path: Path) -> None:
    """Saved when the server ends, by SIGTERM as here, and loaded before it answers."""
    path = tmp_path / "memory.safetensors"
    words = ("--memory", "shared", "--spec-memory", str(path))
    first = serve_once(run, *words)
    tokenizer = AutoTokenizer.from_pretrained(hf_specdec.embedded.path("target"))
    ids = tuple(tokenizer(PROMPT).input_ids)
    _, texts = hf_specdec.SpecMemory.load(path).pool.generations()
    assert tuple(texts[: len(ids)]) == ids
    assert texts.count(-1) == 1
    assert serve_once(run, *words) == first
    assert hf_specdec.SpecMemory.load(path).pool.generations()[1].count(-1) == 2


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ((), "`spec_memory` must come with --memory shared"),
        (("--memory", "shared", "--spec-method", "lookahead"), 'must come with spec_method="auto"'),
        (("--memory", "shared"), "must be a whole file of a memory"),
    ],
    ids=["of one request", "another method", "damaged"],
)
def test_a_memory_that_cannot_be_used_is_refused_before_the_server_starts(
    run: Run, served: dict[str, Any], tmp_path: Path, words: tuple[str, ...], message: str
) -> None:
    path = tmp_path / "memory.safetensors"
    path.write_bytes(b"damaged")
    result = run("serve", "--spec-memory", str(path), *words)
    assert result.exit_code == 2
    assert message in " ".join(result.stderr.split())
    assert not served and path.read_bytes() == b"damaged"
