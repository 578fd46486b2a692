"""The command line `hf-specdec`: one file per command, thin over the Python interface.

Data goes to stdout, logs to stderr, `--json` prints one JSON document. A user's mistake exits with 2.

    hf-specdec generate "def fib(n):" --compare
    hf-specdec bench --limit 6
    hf-specdec info --model path/to/model
    hf-specdec tune path/to/model --out costs.json
"""

import typer

from hf_specdec.cli.bench import bench
from hf_specdec.cli.generate import generate
from hf_specdec.cli.info import info
from hf_specdec.cli.tune import tune

__all__ = ["app"]

app = typer.Typer(name="hf-specdec", no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False)
app.command()(bench)
app.command()(generate)
app.command()(info)
app.command()(tune)


@app.callback()
def main() -> None:
    """Speculative decoding for Hugging Face transformers: the same text, sooner."""
