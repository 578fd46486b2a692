"""The comparison of servers: what is counted and timed, against servers whose answers and delays are known."""

import contextlib
import json
import sys
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import hf_specdec
from hf_specdec.errors import SpecError
from hf_specdec.tools.bench import gpu, serving
from hf_specdec.tools.bench.serving import Server, ask_together, compare, running
from hf_specdec.tools.command_errors import run_program

PROMPTS = ["one", "two", "three"]


@contextlib.contextmanager
def answering(delay: float, *, status: int = 200, error: str | None = None) -> Iterator[tuple[Server, list[Any]]]:
    """A server that streams the prompt back in three tokens, `delay` seconds each, and the bodies that it got."""
    bodies: list[Any] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["content-length"])))
            bodies.append(body)
            self.send_response(status)
            self.end_headers()
            for piece in (body["prompt"], "!", "?"):
                time.sleep(delay)
                self.event({"choices": [{"text": piece}]})
            if error is not None:
                self.event({"error": error})
            self.event({"choices": [{"text": ""}], "usage": {"completion_tokens": 3}})
            self.wfile.write(b"data: [DONE]\n\n")

        def event(self, document: dict[str, Any]) -> None:
            self.wfile.write(f"data: {json.dumps(document)}\n\n".encode())

        def log_message(self, format: str, *args: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield Server(f"{delay} s", server.server_port, {"model": "m"}), bodies
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def test_an_answer_is_put_together_and_timed_to_its_end() -> None:
    with answering(0.02) as (server, bodies):
        text, tokens, seconds = server.ask("one", 9)
    assert (text, tokens) == ("one!?", 3)
    assert seconds >= 0.06
    assert bodies == [{"model": "m", "prompt": "one", "max_tokens": 9, "temperature": 0, "stream": True}]


def test_clients_ask_at_once_and_every_prompt_is_answered_in_its_place() -> None:
    with answering(0.1) as (server, bodies):
        load = ask_together(server, PROMPTS, 3, 9)
        assert load.texts == ["one!?", "two!?", "three!?"]
        assert load.requests_per_second > 3 / 0.9, "the clients wait for one another"
        assert load.seconds_per_token >= 0.1
    assert len(bodies) == 3


@pytest.mark.wide
def test_ratios_are_those_to_the_first_server() -> None:
    """A server of a tenth of the delay is faster, in both measures; a busy machine hides how much."""
    with answering(0.2) as (slow, _), answering(0.02) as (fast, bodies):
        rows = list(compare([slow, fast], PROMPTS, clients=[1, 2], rounds=2, requests=2, max_tokens=9))
    assert [(row["clients"], row["server"]) for row in rows] == [
        (1, slow.name),
        (1, fast.name),
        (2, slow.name),
        (2, fast.name),
    ]
    for row in rows[::2]:
        assert row["throughput_ratios"] == row["speed_ratios"] == [1.0, 1.0]
    for row in rows[1::2]:
        assert min(row["throughput_ratios"]) > 1 and min(row["speed_ratios"]) > 1
        assert row["equal"] == row["requests"] == 2 * row["clients"]
    assert len(bodies) == 1 + 2 * 2 + 2 * 4  # one warms up


@pytest.mark.parametrize("how", [{"status": 503}, {"error": "no memory"}])
def test_a_server_that_fails_is_named(how: dict[str, Any]) -> None:
    with answering(0.0, **how) as (server, _), pytest.raises(SpecError, match=r"0\.0 s (answers 503|ends an answer)"):
        server.ask("one", 9)


def test_a_process_that_ends_shows_its_last_words() -> None:
    command = [sys.executable, "-c", "raise SystemExit('no such model')"]
    with pytest.raises(SpecError, match="no such model"), running(command, 1, {}):
        pass


@pytest.mark.slow
def test_the_embedded_target_is_served_by_both_and_writes_the_same() -> None:
    pytest.importorskip("openai")  # which transformers' server needs
    import typer

    app = typer.Typer()
    app.command()(serving.main)
    words = ["--dtype", "fp32", "--clients", "2", "--requests", "1", "--rounds", "1", "--max-tokens", "8", "--json"]
    result = CliRunner().invoke(app, words)
    assert result.exit_code == 0, result.output
    document = json.loads(result.stdout)
    assert [row["server"] for row in document["rows"]] == [
        "transformers serve",
        "hf-specdec serve, none",
        "hf-specdec serve, auto",
    ]
    assert all(row["equal"] == row["requests"] == 2 for row in document["rows"])
    assert document["versions"]["hf_specdec"] == hf_specdec.__version__


@pytest.mark.parametrize(
    ("main", "words", "told"),
    [
        (serving.main, ["--dtype", "int8"], "`--dtype` must be one of"),
        (serving.main, ["--widen", "wide"], "`--widen` must be"),
        (serving.main, ["--model", "./no/such"], "`--model` must be an existing folder"),
        (gpu.main, ["--output", "gpu.json", "--shape", "2B"], "`--shape` must be one of"),
        (gpu.main, ["--output", "gpu.json", "--shape", "tiny", "--device", "gpu"], "`--device` must be a device that"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_a_mistake_is_one_line_and_exit_code_2(
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    main: Any,
    words: list[str],
    told: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as ended:
        run_program(main, words)
    assert ended.value.code == 2
    assert capsys.readouterr().err.startswith(f"error: {told}")
