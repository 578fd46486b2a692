"""`hf-specdec serve`: an OpenAI-compatible server."""

import contextlib
import logging
import socket
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from hf_specdec.cache.prefix_cache import PrefixCache
from hf_specdec.errors import ConfigError, import_extra, unknown_name
from hf_specdec.tools.cli import options
from hf_specdec.tools.cli.memory import open_memory, remembering
from hf_specdec.tools.cli.options import LoadOptions, MethodOptions
from hf_specdec.tools.cli.spread import spread
from hf_specdec.tools.command_errors import note

LOCAL = ("127.0.0.1", "localhost", "::1")


@dataclass(frozen=True, slots=True)
class AccessOptions:
    """Address of the server, and its keys."""

    host: Annotated[str, typer.Option(help="Address to listen on; 0.0.0.0 is every network of this machine.")] = (
        "127.0.0.1"
    )
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port to listen on.")] = 8000
    api_key: Annotated[
        list[str] | None,
        typer.Option(envvar="HF_SPECDEC_API_KEY", help="A key that requests must carry; may be repeated."),
    ] = None
    served_model_name: Annotated[
        str | None, typer.Option(help="What clients call the model. Default: its folder or name.")
    ] = None
    tool_parser: Annotated[
        str | None,
        typer.Option(
            help="How the model writes tool calls: hermes, llama3_json, mistral, pythonic, qwen3_coder, or a JSON file "
            "with a response template of transformers. Default: what its chat template shows."
        ),
    ] = None
    shutdown_timeout: Annotated[
        int, typer.Option(min=0, help="Seconds that open answers may take after the signal to end (SIGTERM, Ctrl-C).")
    ] = 30

    def check(self) -> None:
        """Refuse a key that every request would carry."""
        for key in self.api_key or ():
            if not key.strip():
                raise ConfigError("--api-key", "must hold a key", key, "Is the variable set? Leave it out for none.")

    def listen(self) -> socket.socket:
        """Open a socket at the address."""
        family = socket.AF_INET6 if ":" in self.host else socket.AF_INET
        return socket.create_server((self.host, self.port), family=family)

    def warn(self) -> None:
        """Say so where anybody may use the model."""
        if self.host not in LOCAL and not self.api_key:
            note(f"note: everyone who reaches {self.host} can use the model; --api-key asks for a key", "yellow")


@dataclass(frozen=True, slots=True)
class QueueOptions:
    """Batch, queue and memory that requests share."""

    batch_size: Annotated[int, typer.Option(min=1, help="Requests decoded together.")] = 8
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Most new tokens of a request that does not say.")] = 512
    max_queue: Annotated[
        int, typer.Option(min=1, help="Most requests that wait for a place; further ones get status 429.")
    ] = 256
    memory: Annotated[
        str,
        typer.Option(
            help="Which earlier texts methods draft from: none next to the request's own (request), those of the same "
            "API key (key), or those of all clients (shared)."
        ),
    ] = "request"
    prefix_cache_size: Annotated[
        float,
        typer.Option(
            min=0,
            help="Gigabytes of keys and values of earlier texts to keep for prompts that begin alike, of the same key, "
            "or with --memory shared, of all clients. Mixtures in bf16 on CPUs need --prefill-chunk-size.",
        ),
    ] = 1.0
    prefill_chunk_size: Annotated[
        int | None, typer.Option(min=1, help="Tokens of a prompt that one forward reads. Default: all of them.")
    ] = None

    def check(self, api_keys: list[str] | None, file: Path | None) -> None:
        """Refuse a memory that is none, or by keys without any, or in a file though it is not one for all."""
        if self.memory not in ("request", "key", "shared"):
            raise unknown_name("--memory", self.memory, ("request", "key", "shared"))
        if self.memory == "key" and not api_keys:
            rule = "must come with --api-key where it is by key"
            raise ConfigError("--memory", rule, self.memory, "Add --api-key KEY.")
        if file is not None and self.memory != "shared":
            remedy = "Add --memory shared: the file is of the texts of all clients."
            raise ConfigError("--spec-memory", "must come with --memory shared", str(file), remedy)


@dataclass(frozen=True, slots=True)
class LimitOptions:
    """Limits of one request, and the log."""

    max_body: Annotated[int, typer.Option(min=1, help="Most bytes of a body; larger ones get status 413.")] = 10_000_000
    max_prompt_tokens: Annotated[
        int | None, typer.Option(min=1, help="Most tokens of a prompt. Default: as many as the model has positions.")
    ] = None
    max_tokens: Annotated[
        int | None, typer.Option(min=1, help="Most new tokens that a request may ask for. Default: likewise.")
    ] = None
    request_timeout: Annotated[
        float | None,
        typer.Option(min=0.001, help="Seconds that a request may take, waiting too; then it ends with status 504."),
    ] = None
    log_requests: Annotated[
        bool, typer.Option("--log-requests", help="Write a line of JSON to stderr for each request.")
    ] = False

    def start_log(self) -> None:
        """Write the requests' log where it is asked for."""
        if self.log_requests:
            logger = logging.getLogger("hf_specdec.requests")
            logger.setLevel(logging.INFO)
            logger.propagate = False
            logger.handlers = [logging.StreamHandler()]


@spread
def serve(
    *,
    model: options.ModelPath = None,
    access: AccessOptions,
    queue: QueueOptions,
    limits: LimitOptions,
    spec_memory: options.SpecMemoryFile = None,
    choice: MethodOptions,
    dtype: options.Dtype = "auto",
    loading: LoadOptions,
) -> None:
    """Serve a model to OpenAI's clients; requests share one batch.

    The server listens on this machine alone unless --host says otherwise.
    """
    import_extra("uvicorn", "serve", "The server")
    from hf_specdec.tools.serve.app import build_app  # needs the extra
    from hf_specdec.tools.serve.engine import ServingEngine
    from hf_specdec.tools.serve.limits import ServerLimits
    from hf_specdec.tools.serve.requests import RequestReader
    from hf_specdec.tools.serve.server import EndingServer

    access.check()
    queue.check(access.api_key, spec_memory)
    access.listen().close()  # an error before the model is loaded
    method, config = choice.read(model, memory=spec_memory)
    kept = open_memory(spec_memory)
    target = loading.load(model, dtype, config)
    how = choice.arguments(method, config, dtype, target)
    name, method = access.served_model_name or model or "embedded", method or "plain"
    reader = RequestReader(
        target.model,
        target.tokenizer,
        name,
        spec_method=method,
        spec_config=config,
        max_new_tokens=queue.max_new_tokens,
        reserved=config if choice.has_config else None,
        draft_model=how.get("assistant_model"),
        draft_tokenizer=how.get("assistant_tokenizer"),
        limits=ServerLimits(limits.max_body, limits.max_prompt_tokens, limits.max_tokens, limits.request_timeout),
        tool_parser=access.tool_parser,
        memory=queue.memory,  # type: ignore[arg-type]  # checked above
    )
    with contextlib.closing(access.listen()) as listening, remembering(target.model, kept):
        engine = ServingEngine(
            target.model,
            target.tokenizer,
            max_batch_size=queue.batch_size,
            max_queue=queue.max_queue,
            options={
                "spec_method": method,
                "prefix_cache": PrefixCache(round(queue.prefix_cache_size * 1e9)),
                "prefill_chunk_size": queue.prefill_chunk_size,
            },
        )
        app = build_app(engine, reader, api_keys=access.api_key or [])
        access.warn()
        limits.start_log()
        host = f"[{access.host}]" if ":" in access.host else access.host
        note(f"serving {name} on http://{host}:{listening.getsockname()[1]}/v1", "dim")
        server = EndingServer(app, engine, seconds=access.shutdown_timeout, log_level="warning")
        with contextlib.suppress(KeyboardInterrupt):  # Ctrl-C ends it as SIGTERM does
            server.run(sockets=[listening])
    if not server.started:
        raise typer.Exit(1)
