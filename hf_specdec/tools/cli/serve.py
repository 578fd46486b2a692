"""`hf-specdec serve`: an OpenAI-compatible server."""

import json
from dataclasses import dataclass
from typing import Annotated, Literal

import typer

from hf_specdec.errors import ConfigError, import_extra
from hf_specdec.tools.cli.options import AtLeastOne, LoadOptions, MethodOptions, check_port
from hf_specdec.tools.cli.spread import spread
from hf_specdec.tools.command_errors import note

LOCAL = ("127.0.0.1", "localhost", "::1")
PACKAGES = ("fastapi", "uvicorn", "openai", "prometheus_client", "llguidance")  # of the extra


@dataclass(frozen=True, slots=True)
class ServerOptions:
    """Address of the server, and its keys.

    Attributes:
        host (`str`): Address to listen on; 0.0.0.0 is every network here.
        port (`int`): Port to listen on; 0 is a free one.
        api_key (`list[str]`): A key that requests must carry; may be repeated.
        served_model_name (`str`): What clients call the model. Default: its folder or name.
        shutdown_timeout (`int`): Seconds that open answers may take after the signal to end (SIGTERM, Ctrl-C).
        limit_concurrency (`int`): Most connections; further ones get status 503. Default: no limit.
    """

    host: str = "127.0.0.1"
    port: Annotated[int, typer.Option(min=0, max=65535)] = 8000
    api_key: Annotated[list[str] | None, typer.Option(envvar="HF_SPECDEC_API_KEY")] = None
    served_model_name: str | None = None
    shutdown_timeout: Annotated[int, typer.Option(min=0)] = 30
    limit_concurrency: AtLeastOne = None

    def check(self) -> None:
        """Refuse a key that every request would carry, and say so where anybody may use the model."""
        for key in self.api_key or ():
            if not key.strip():
                raise ConfigError("api_key", "must hold a key", key, "Is the variable set? Leave it out for none.")
        if self.host not in LOCAL and not self.api_key:
            note(f"note: everyone who reaches {self.host} can use the model; --api-key asks for a key", "yellow")

    def first_request(self, model: str, *, is_chat: bool) -> str:
        """Describes what is served, where, and a command that asks it."""
        address = f"http://{'127.0.0.1' if self.host == '0.0.0.0' else self.host}:{self.port or 'PORT'}/v1"
        route = "chat/completions" if is_chat else "completions"
        messages = {"messages": [{"role": "user", "content": "What is a queue?"}]}
        key = ' -H "Authorization: Bearer KEY"' if self.api_key else ""
        body = json.dumps({"model": model, **(messages if is_chat else {"prompt": "def add"}), "max_tokens": 64})
        return f"""serving {model} at {address}; for example:
  curl {address}/{route} -H "Content-Type: application/json"{key} -d '{body}'"""


@dataclass(frozen=True, slots=True)
class BatchOptions:
    """Batch, queue and memory that requests share.

    Attributes:
        batch_size (`int`): Requests decoded together.
        max_new_tokens (`int`): Most new tokens of a request that does not say.
        max_queue (`int`): Most requests that wait for a place; further ones get status 429.
        memory (`str`): Texts that methods draft from: those of the request, or also earlier ones of all clients.
        prefix_cache_size (`float`): Gigabytes of keys and values to keep for prompts that begin like earlier texts.
        prefill_chunk_size (`int`): Tokens of a prompt in one forward. Mixtures in bf16 on CPUs need it.
    """

    batch_size: Annotated[int, typer.Option(min=1)] = 8
    max_new_tokens: Annotated[int, typer.Option(min=1)] = 512
    max_queue: Annotated[int, typer.Option(min=1)] = 256
    memory: Literal["request", "shared"] = "request"
    prefix_cache_size: Annotated[float, typer.Option(min=0)] = 1.0
    prefill_chunk_size: AtLeastOne = None


@spread
def serve(
    *,
    loading: LoadOptions,
    server: ServerOptions,
    batch: BatchOptions,
    method: MethodOptions,
) -> None:
    """Serve a model to OpenAI's clients; requests share one batch.

    The server listens on this machine alone unless --host says otherwise.
    """
    server.check()
    check_port(server.host, server.port)
    for package in PACKAGES:
        import_extra(package, "serve", "The server")
    import uvicorn

    from hf_specdec.api.many_prompts.generate_many import generate_many
    from hf_specdec.api.many_prompts.shared_batch import SharedBatch
    from hf_specdec.cache.prefix_cache import PrefixCache
    from hf_specdec.tools.cli.models import load
    from hf_specdec.tools.serve.app import build_app
    from hf_specdec.tools.serve.requests import RequestReader, method_arguments

    loaded, kwargs = load(loading, method)
    shares_texts = batch.memory == "shared"
    reader = RequestReader(
        loaded.model,
        loaded.tokenizer,
        server.served_model_name or loaded.name,
        max_new_tokens=batch.max_new_tokens,
        shares_texts=shares_texts,
    )
    shared = SharedBatch(
        loaded.model,
        tokenizer=loaded.tokenizer,
        max_batch_size=batch.batch_size,
        max_queue=batch.max_queue,
        prefix_cache=PrefixCache(round(batch.prefix_cache_size * 1e9)),
        prefill_chunk_size=batch.prefill_chunk_size,
        **method_arguments(kwargs, shares_texts=shares_texts),
    )
    note(f"{reader.name} tries its first tokens", "dim")
    tried = method_arguments(kwargs, shares_texts=False)  # nothing drafts from it later
    list(generate_many(loaded.model, [reader.trial()], prefill_chunk_size=batch.prefill_chunk_size, **tried))
    note(server.first_request(reader.name, is_chat=loaded.tokenizer.chat_template is not None))
    uvicorn.run(
        build_app(shared, reader, api_keys=server.api_key or []),
        host=server.host,
        port=server.port,
        limit_concurrency=server.limit_concurrency,
        timeout_graceful_shutdown=server.shutdown_timeout,
    )
