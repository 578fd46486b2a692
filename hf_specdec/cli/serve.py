"""`hf-specdec serve`: an OpenAI-compatible server."""

import importlib
from typing import Annotated, Any

import typer

from hf_specdec.cli import options
from hf_specdec.cli.inputs import load, load_draft, set_threads
from hf_specdec.cli.method import DRAFT_METHODS, check_draft_options, read_method
from hf_specdec.cli.report import note, reports_errors
from hf_specdec.cli.where import read_where
from hf_specdec.errors import MissingExtraError

__all__ = ["serve"]

LOCAL = ("127.0.0.1", "localhost", "::1")

Host = Annotated[str, typer.Option("--host", help="Address to listen on; 0.0.0.0 is every network of this machine.")]
Port = Annotated[int, typer.Option("--port", min=0, max=65535, help="Port to listen on.")]
ApiKey = Annotated[
    list[str] | None,
    typer.Option("--api-key", envvar="HF_SPECDEC_API_KEY", help="A key that requests must carry; may be repeated."),
]
ServedName = Annotated[
    str | None, typer.Option("--served-model-name", help="What clients call the model. Default: its folder or name.")
]
RequestsAtOnce = Annotated[int, typer.Option("--batch-size", min=1, help="Requests decoded together.")]
DefaultTokens = Annotated[
    int, typer.Option("--max-new-tokens", min=1, help="Most new tokens of a request that does not say.")
]
ShareMemory = Annotated[
    bool,
    typer.Option(
        "--share-memory",
        help="Let methods draft from the texts of earlier requests, of all clients. Default: from a request's own.",
    ),
]


@reports_errors
def serve(
    model: options.ModelPath = None,
    host: Host = "127.0.0.1",
    port: Port = 8000,
    api_key: ApiKey = None,
    served_model_name: ServedName = None,
    batch_size: RequestsAtOnce = 8,
    max_new_tokens: DefaultTokens = 512,
    share_memory: ShareMemory = False,
    spec_method: options.SpecMethod = None,
    prompt_lookup_config: options.PromptLookup = None,
    lookahead_config: options.LookaheadList = None,
    draft_model_config: options.DraftModelList = None,
    auto_config: options.AutoConfig = None,
    spec_config: options.SpecConfigText = None,
    draft_model: options.DraftModelPath = None,
    dtype: options.Dtype = "auto",
    draft_dtype: options.DraftDtype = None,
    attn_implementation: options.AttnImplementation = None,
    threads: options.Threads = None,
    device_map: options.DeviceMap = None,
    max_memory: options.MaxMemory = None,
    offload_folder: options.OffloadFolder = None,
) -> None:
    """Serve a model to OpenAI's clients; requests share one batch.

    The server listens on this machine alone unless --host says otherwise.
    """
    uvicorn = _uvicorn()
    forms = {"prompt_lookup_config": prompt_lookup_config, "lookahead_config": lookahead_config}
    forms |= {"draft_model_config": draft_model_config, "auto_config": auto_config}
    method, config = read_method(
        spec_method, list_forms=forms, spec_config=spec_config, engine=None, draft_model=draft_model
    )
    check_draft_options(method, model=model, draft_model=draft_model, draft_dtype=draft_dtype)
    set_threads(model, threads)
    place: dict[str, Any] = {"device_map": device_map, "max_memory": max_memory, "offload_folder": offload_folder}
    where = read_where(**place, tensor_parallel=False, config=config)
    loaded, tokenizer = load(model, dtype, config, where, attn_implementation=attn_implementation)
    draft = None
    if method in DRAFT_METHODS or draft_model is not None:
        draft = load_draft(draft_model, draft_dtype or dtype, config, where.beside(loaded))
    name = served_model_name or model or "embedded"
    settings = {"draft_model": draft, "is_memory_shared": share_memory}
    app = _app(loaded, tokenizer, name, method or "plain", config, max_new_tokens, batch_size, api_key or (), settings)
    if host not in LOCAL and not api_key:
        note(f"note: everyone who reaches {host} can use the model; --api-key asks for a key", "yellow")
    note(f"serving {name} on http://{host}:{port}/v1", "dim")
    uvicorn.run(app, host=host, port=port, log_level="warning")


def _uvicorn() -> Any:
    try:
        return importlib.import_module("uvicorn")
    except ImportError as error:
        raise MissingExtraError("uvicorn", "serve", "The server") from error


def _app(
    model: Any,
    tokenizer: Any,
    name: str,
    method: str,
    config: Any,
    max_new_tokens: int,
    batch_size: int,
    api_keys: Any,
    settings: dict[str, Any],
) -> Any:
    from hf_specdec.serve.app import build_app
    from hf_specdec.serve.engine import ServingEngine
    from hf_specdec.serve.requests import RequestReader

    reader = RequestReader(model, tokenizer, name, method, config, max_new_tokens, **settings)
    engine = ServingEngine(model, tokenizer, max_batch_size=batch_size, options={"spec_method": method})
    return build_app(engine, reader, api_keys=list(api_keys))
