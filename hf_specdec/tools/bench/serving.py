"""Servers: requests a second and time per token of `hf-specdec serve` and of `transformers serve`, in one run.

    python -m hf_specdec.tools.bench.serving --widen 1280x16 --dtype bf16 --clients 1 --clients 4

All servers are up at once and are asked in turns, each round the same prompts: a ratio is that of one server and the
first, within a round, and its row is the median over rounds. Clients stream; each sends its next request when it has
the answer to the last. Time per token is a request's seconds, its waiting included, over its tokens, as in the papers
of Orca and vLLM.
"""

import contextlib
import dataclasses
import http.client
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

from hf_specdec.errors import SpecError, unknown_name
from hf_specdec.kernels.quantization.precision import DTYPES
from hf_specdec.kernels.quantization.report import num_parameters
from hf_specdec.loading import embedded
from hf_specdec.loading.auto import AutoModelForCausalLM
from hf_specdec.loading.checkpoints.tokenizers import load_tokenizer
from hf_specdec.tools.bench.header import header
from hf_specdec.tools.bench.prompts import load_prompts, spread
from hf_specdec.tools.bench.widen import read_size, widen
from hf_specdec.tools.command_errors import run_program

SECONDS_TO_START = 600
MOST_PROMPTS = 32


@dataclasses.dataclass(frozen=True, slots=True)
class Server:
    """A server that is up, and what its requests say.

    Attributes:
        port (`int`): of this machine.
        fields: of every request's body, next to the prompt and the number of tokens.
    """

    name: str
    port: int
    fields: dict[str, Any]

    def ask(self, prompt: str, max_tokens: int) -> tuple[str, int, float]:
        """The streamed answer to one prompt: its text, its tokens, and the seconds until its end."""
        body = {**self.fields, "prompt": prompt, "max_tokens": max_tokens, "temperature": 0, "stream": True}
        started = time.perf_counter()
        with contextlib.closing(http.client.HTTPConnection("127.0.0.1", self.port, timeout=3600)) as connection:
            connection.request("POST", "/v1/completions", json.dumps(body), {"content-type": "application/json"})
            response = connection.getresponse()
            if response.status != 200:
                raise SpecError(f"{self.name} answers {response.status}: {response.read()[:300]!r}")
            text, tokens = "", 0
            for line in response:
                if not line.startswith(b"data: ") or line.startswith(b"data: [DONE]"):
                    continue
                event = json.loads(line[6:])
                if "error" in event:
                    raise SpecError(f"{self.name} ends an answer with {event['error']}")
                text += "".join(choice.get("text") or "" for choice in event["choices"])
                tokens = (event.get("usage") or {}).get("completion_tokens", tokens)
        return text, tokens, time.perf_counter() - started


@dataclasses.dataclass(frozen=True, slots=True)
class Load:
    """Speed and answers of a server under some clients.

    Attributes:
        requests_per_second (`float`): all requests over the seconds until the last answer.
        seconds_per_token (`float`): median over requests.
        texts (`list[str]`): the answers, in the order of the prompts.
    """

    requests_per_second: float
    seconds_per_token: float
    texts: list[str]


def ask_together(server: Server, prompts: Sequence[str], clients: int, max_tokens: int) -> Load:
    """Every prompt once, by `clients` that ask one after the other."""
    started = time.perf_counter()
    with ThreadPoolExecutor(clients) as pool:
        answers = list(pool.map(lambda prompt: server.ask(prompt, max_tokens), prompts))
    seconds = time.perf_counter() - started
    per_token = statistics.median(took / max(tokens, 1) for _, tokens, took in answers)
    return Load(len(prompts) / seconds, per_token, [text for text, _, _ in answers])


def compare(
    servers: Sequence[Server],
    prompts: Sequence[str],
    *,
    clients: Sequence[int],
    rounds: int,
    requests: int,
    max_tokens: int,
) -> Iterator[dict[str, Any]]:
    """One row for each number of clients and each server: medians over rounds, and ratios to the first server.

    Args:
        requests (`int`): of each client in a round.
    """
    for server in servers:  # warms up
        server.ask(prompts[0], max_tokens)
    for count in clients:
        asked = [prompts[number % len(prompts)] for number in range(count * requests)]
        found = [[ask_together(server, asked, count, max_tokens) for server in servers] for _ in range(rounds)]
        for place, server in enumerate(servers):
            own, first = [loads[place] for loads in found], [loads[0] for loads in found]
            pairs = list(zip(own, first, strict=True))
            yield {
                "clients": count,
                "server": server.name,
                "requests_per_second": statistics.median(load.requests_per_second for load in own),
                "seconds_per_token": statistics.median(load.seconds_per_token for load in own),
                "throughput_ratios": sorted(a.requests_per_second / b.requests_per_second for a, b in pairs),
                "speed_ratios": sorted(b.seconds_per_token / a.seconds_per_token for a, b in pairs),
                "equal": sum(a == b for a, b in zip(own[0].texts, first[0].texts, strict=True)),
                "requests": len(asked),
            }


@contextlib.contextmanager
def running(command: Sequence[str], port: int, environment: dict[str, str]) -> Iterator[None]:
    """A server's process, from the time it answers to the end of the block."""
    with tempfile.TemporaryFile() as log:
        process = subprocess.Popen(command, stdout=log, stderr=log, env={**os.environ, **environment})
        try:
            until = time.monotonic() + SECONDS_TO_START
            while not _answers(port):
                if process.poll() is not None or time.monotonic() > until:
                    log.seek(0)
                    raise SpecError(f"{' '.join(command)} does not serve: {log.read()[-500:].decode(errors='replace')}")
                time.sleep(0.5)
            yield
        finally:
            process.terminate()
            process.wait()


def _answers(port: int) -> bool:
    with contextlib.closing(http.client.HTTPConnection("127.0.0.1", port, timeout=5)) as connection:
        try:
            connection.request("GET", "/health")
            return connection.getresponse().status == 200
        except OSError:
            return False


def _free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


@contextlib.contextmanager
def _servers(folder: Path, *, batch_size: int, threads: int, is_continuous: bool) -> Iterator[list[Server]]:
    """`transformers serve`, also with its continuous batching, and `hf-specdec serve` asked in two ways."""
    name, environment = str(folder), {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": str(threads)}
    theirs = [sys.executable, "-m", "transformers.cli.transformers", "serve", name]
    ours = [sys.executable, "-m", "hf_specdec", "serve", "--model", name, "--batch-size", str(batch_size)]
    ours += ["--prefix-cache-size", "0"]  # rounds and methods ask for the same prompts
    fields = {"model": name, "stream_options": {"include_usage": True}}
    with contextlib.ExitStack() as stack:

        def port_of(command: list[str]) -> int:
            port = _free_port()
            stack.enter_context(running([*command, "--port", str(port)], port, environment))
            return port

        servers = [Server("transformers serve", port_of(theirs), {"model": name})]
        if is_continuous:
            option = "--continuous-batching"
            servers.append(Server(f"transformers serve {option}", port_of([*theirs, option]), {"model": name}))
        port = port_of(ours)
        for method in ("none", "auto"):
            servers.append(Server(f"hf-specdec serve, {method}", port, {**fields, "spec_method": method}))
        yield servers


def _checkpoint(model: str | None, size: str | None, dtype: str, folder: str) -> Path:
    """A folder that all servers load as it is: the model in `dtype`, widened or not."""
    path = embedded.path("target") if model is None else model
    widths = None if size is None else read_size(size)
    loaded: Any = AutoModelForCausalLM.from_pretrained(path, precision=dtype)
    if widths is not None:
        loaded = widen(loaded, hidden_size=widths[0], num_layers=widths[1])
    loaded.save_pretrained(folder)
    load_tokenizer(path).save_pretrained(folder)
    note(f"{num_parameters(loaded) / 1e6:.0f}M parameters, {dtype}")
    return Path(folder)


def note(text: str) -> None:
    """For whoever waits, on stderr."""
    typer.echo(text, err=True)


def main(
    model: Annotated[str | None, typer.Option(help="Default: the embedded target.")] = None,
    widen_to: Annotated[str | None, typer.Option("--widen", help="HIDDENxLAYERS, as for bench.")] = None,
    dtype: Annotated[str, typer.Option(help="fp32, bf16 or fp16.")] = "bf16",
    prompts: Annotated[list[Path] | None, typer.Option(help="Prompt files, as for bench.")] = None,
    clients: Annotated[list[int] | None, typer.Option(min=1, help="Repeat for more. Default: 1, 4 and 16.")] = None,
    requests: Annotated[int, typer.Option(min=1, help="Of each client in a round.")] = 2,
    rounds: Annotated[int, typer.Option(min=1, help="How often each server is asked.")] = 3,
    max_tokens: Annotated[int, typer.Option(min=1, help="Of each answer.")] = 64,
    batch_size: Annotated[int, typer.Option(min=1, help="Of hf-specdec serve.")] = 16,
    threads: Annotated[int, typer.Option(min=1, help="Of each server.")] = 1,
    continuous: Annotated[bool, typer.Option(help="Also transformers serve --continuous-batching.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON document on stdout.")] = False,
) -> None:
    """Requests a second and time per token of servers, at several numbers of clients."""
    if dtype not in DTYPES:
        raise unknown_name("dtype", dtype, DTYPES)
    texts = [prompt.turns[0] for prompt in spread(load_prompts(prompts or []), MOST_PROMPTS)]
    rows = []
    with (
        tempfile.TemporaryDirectory() as place,
        _servers(
            _checkpoint(model, widen_to, dtype, place), batch_size=batch_size, threads=threads, is_continuous=continuous
        ) as servers,
    ):
        how = {"rounds": rounds, "requests": requests, "max_tokens": max_tokens}
        for row in compare(servers, texts, clients=clients or [1, 4, 16], **how):
            rows.append(row)
            typer.echo(_line(row), err=as_json)
    if as_json:
        typer.echo(json.dumps({**header(torch.device("cpu")), "threads": threads, "rows": rows}))


def _line(row: dict[str, Any]) -> str:
    throughput, speed = row["throughput_ratios"], row["speed_ratios"]
    return (
        f"{row['clients']:>3} clients  {row['server']:<40} {row['requests_per_second']:7.3f} requests/s "
        f"({_spread(throughput)})  {1000 * row['seconds_per_token']:7.1f} ms/token ({_spread(speed)})  "
        f"{row['equal']} of {row['requests']} texts equal"
    )


def _spread(ratios: list[float]) -> str:
    return f"x{statistics.median(ratios):.2f}, {ratios[0]:.2f} to {ratios[-1]:.2f}"


if __name__ == "__main__":
    run_program(main)
