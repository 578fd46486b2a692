"""`hf-specdec serve`: an OpenAI-compatible server."""

from typing import Annotated

import typer

from hf_specdec.cli import options
from hf_specdec.cli.options import LoadOptions, MethodOptions
from hf_specdec.cli.report import note, reports_errors
from hf_specdec.cli.spread import spread
from hf_specdec.errors import ConfigError, import_extra, unknown_name

__all__ = ["serve"]

LOCAL = ("127.0.0.1", "localhost", "::1")


@reports_errors
@spread
def serve(
    *,
    model: options.ModelPath = None,
    host: Annotated[
        str, typer.Option(help="Address to listen on; 0.0.0.0 is every network of this machine.")
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port to listen on.")] = 8000,
    api_key: Annotated[
        list[str] | None,
        typer.Option(envvar="HF_SPECDEC_API_KEY", help="A key that requests must carry; may be repeated."),
    ] = None,
    served_model_name: Annotated[
        str | None, typer.Option(help="What clients call the model. Default: its folder or name.")
    ] = None,
    batch_size: Annotated[int, typer.Option(min=1, help="Requests decoded together.")] = 8,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Most new tokens of a request that does not say.")] = 512,
    max_queue: Annotated[
        int, typer.Option(min=1, help="Most requests that wait for a place; further ones get status 429.")
    ] = 256,
    memory: Annotated[
        str,
        typer.Option(
            help="Which earlier texts methods draft from: none beside the request's own (request), those of the same "
            "API key (key), or those of all clients (shared)."
        ),
    ] = "request",
    choice: MethodOptions,
    dtype: options.Dtype = "auto",
    loading: LoadOptions,
) -> None:
    """Serve a model to OpenAI's clients; requests share one batch.

    The server listens on this machine alone unless --host says otherwise.
    """
    uvicorn = import_extra("uvicorn", "serve", "The server")
    from hf_specdec.serve.app import build_app  # needs the extra
    from hf_specdec.serve.engine import ServingEngine
    from hf_specdec.serve.requests import RequestReader

    if memory not in ("request", "key", "shared"):
        raise unknown_name("--memory", memory, ("request", "key", "shared"))
    if memory == "key" and not api_key:
        raise ConfigError("--memory", "must come with --api-key where it is by key", memory, "Add --api-key KEY.")
    method, config = choice.read(model)
    target = loading.load(model, dtype, config)
    how = choice.arguments(method, config, dtype, target)
    name, method = served_model_name or model or "embedded", method or "plain"
    reader = RequestReader(
        target.model,
        target.tokenizer,
        name,
        spec_method=method,
        spec_config=config,
        max_new_tokens=max_new_tokens,
        reserved=config if choice.has_config else None,
        draft_model=how.get("assistant_model"),
        draft_tokenizer=how.get("assistant_tokenizer"),
        memory=memory,  # type: ignore[arg-type]  # checked above
    )
    engine = ServingEngine(
        target.model,
        target.tokenizer,
        max_batch_size=batch_size,
        max_queue=max_queue,
        options={"spec_method": method},
    )
    app = build_app(engine, reader, api_keys=api_key or [])
    if host not in LOCAL and not api_key:
        note(f"note: everyone who reaches {host} can use the model; --api-key asks for a key", "yellow")
    note(f"serving {name} on http://{host}:{port}/v1", "dim")
    uvicorn.run(app, host=host, port=port, log_level="warning")
