"""The command line `hf-specdec`: one file per command, thin over the Python interface.

Data goes to stdout, logs to stderr, `--json` prints one JSON document. A user's mistake exits with 2. A command's
module is imported when the command is called, so that `--help` and `--version` are there at once. Options may be
written with `_` for `-`.
"""

import importlib
from typing import Annotated, Any

import typer

from hf_specdec import __version__
from hf_specdec.tools.command_errors import Command

COMMANDS = {  # each in the module and the function of its name
    "bench": "Measure ways to generate on the same prompts in turn, next to transformers' generate and plain decoding.",
    "demo": "Open a page that races speculation against plain generate, and shows what happens inside each step.",
    "chat": "Chat with a model in the terminal.",
    "fetch": "Fetch a published model by pip and print the folder of its checkpoint.",
    "generate": "Continue a prompt with speculative decoding.",
    "info": "Say what a model can do on this machine and why.",
    "serve": "Serve a model to OpenAI's clients; requests share one batch.",
    "summarize": "Summarise articles plainly and with a method: ROUGE scores and tokens a second of both.",
    "train": "Train an EAGLE-3 head for a target, by transformers' Trainer.",
}
OPTIONS: dict[str, Any] = {"add_completion": False, "pretty_exceptions_enable": False}


app = typer.Typer(
    name="hf-specdec",
    no_args_is_help=True,
    context_settings={"token_normalize_func": lambda name: name.replace("_", "-")},
    **OPTIONS,
)


class _Imported(Command):
    """A command that is imported when it is called."""

    def make_context(self, info_name: str | None, args: list[str], parent: Any = None, **extra: Any) -> Any:
        """Context of the imported command; see `typer.core.TyperCommand`."""
        alone = typer.Typer(**OPTIONS)
        command = getattr(importlib.import_module(f"{__name__}.{self.name}"), str(self.name))
        alone.command(self.name, cls=Command)(command)
        return typer.main.get_command(alone).make_context(info_name, args, parent, **extra)


for _name, _summary in COMMANDS.items():
    app.command(_name, cls=_Imported, help=_summary)(lambda: None)


def _show_version(is_set: bool) -> None:
    if is_set:
        typer.echo(__version__)
        raise typer.Exit


@app.callback()
def main(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Speculative decoding for Hugging Face transformers: the same text, sooner."""
