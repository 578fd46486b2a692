"""What runs the measurements that are programs of their own, such as `python -m hf_specdec.bench.gpu`."""

import sys
from collections.abc import Callable, Sequence

import typer

from hf_specdec.errors import SpecError

__all__ = ["run_program"]


def run_program(main: Callable[..., None], arguments: Sequence[str] | None = None) -> None:
    """Run `main` with the words of the command line; a user's mistake is one line on stderr and exit code 2.

    Args:
        arguments: the words; by default those that Python was called with.
    """
    app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
    app.command()(main)
    try:
        app(args=arguments)
    except SpecError as error:
        typer.echo(f"error: {error}", err=True)
        sys.exit(2)
