"""`hf-specdec tune`: measure what forwards cost on this machine, for `spec_method="auto"` to begin with."""

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from hf_specdec.common.files import check_output
from hf_specdec.engine.cost.cost_model import check_costs_file
from hf_specdec.errors import ConfigError
from hf_specdec.tools.bench.table import Table
from hf_specdec.tools.bench.tuning import Tuned, measure_costs
from hf_specdec.tools.cli import options
from hf_specdec.tools.cli.options import LoadOptions, ModelOptions
from hf_specdec.tools.cli.report import note_interrupt, print_json, print_table
from hf_specdec.tools.cli.spread import spread
from hf_specdec.tools.command_errors import INTERRUPTED, note


@spread
def tune(
    *,
    out: Annotated[Path, typer.Option(help='The file to write, for auto_config={"costs": FILE}.')],
    model: ModelOptions,
    dtype: options.Dtype = "auto",
    loading: LoadOptions,
    batch_size: Annotated[
        list[int] | None, typer.Option(min=1, help="Rows decoded together; repeat for more. Default: 1.")
    ] = None,
    context_length: Annotated[int, typer.Option(min=1, help="Tokens in the cache.")] = 256,
    seconds: Annotated[float, typer.Option(help="Most time to measure, for each batch size.")] = 20.0,
    json: options.Json = False,
) -> None:
    """Measure what a forward of T tokens costs, and keep it in a file for `auto`.

    Without such a file, `auto` begins with an assumption about the device, and learns from the steps of its calls.
    The exit code is 130 if the measurement is interrupted; the batch sizes that were measured are kept all the same.
    """
    if not seconds > 0:
        raise ConfigError("--seconds", "must be above 0", seconds, "The default is 20.")
    check_output("--out", out)
    check_costs_file("--out", out)
    loaded = loading.load(model.chosen, dtype).model
    tuned, is_complete = _measured(loaded, batch_size or (1,), context_length, seconds)
    tuned.costs.save(out, tuned.facts)
    if json:
        found = {"facts": tuned.facts, "curves": _curves(tuned), "is_complete": is_complete}
        print_json({"out": str(out), **found})
    else:
        names = ("class", "dtype", "attention", "device", "threads", "context_length")
        print_table(_table(tuned), ", ".join(f"{name} {tuned.facts[name]}" for name in names))
    note(f"wrote {out}", "dim")
    if not is_complete:
        raise typer.Exit(INTERRUPTED)


def _measured(model: Any, batch_sizes: Sequence[int], context_length: int, seconds: float) -> tuple[Tuned, bool]:
    """The curves, and whether of all batch sizes; an interrupt leaves those that are measured."""
    found: list[Tuned] = []
    options: dict[str, Any] = {"batch_sizes": batch_sizes, "context_length": context_length, "seconds": seconds}
    try:
        return measure_costs(model, **options, save=found.append), True
    except KeyboardInterrupt:
        if not found:
            raise
        note_interrupt()
    return found[-1], False


def _curves(tuned: Tuned) -> list[dict[str, Any]]:
    """Seconds and ratios by batch size and tokens a row."""
    return [
        {
            "batch_size": rows,
            "points": [
                {"num_tokens": size, "seconds": found, "ratio": found / seconds[1]} for size, found in seconds.items()
            ],
        }
        for rows, seconds in tuned.seconds.items()
    ]


def _table(tuned: Tuned) -> Table:
    columns, lines = {"tokens a row": "{size}"}, dict[int, dict[str, Any]]()
    for rows, seconds in tuned.seconds.items():
        columns |= {f"batch {rows}": f"{{ms{rows}:.2f}} ms", f"x one token of {rows}": f"{{ratio{rows}:.2f}}"}
        for size, found in seconds.items():
            line = lines.setdefault(size, {"size": size})
            line |= {f"ms{rows}": 1e3 * found, f"ratio{rows}": found / seconds[1]}
    return Table.of("", columns, [lines[size] for size in sorted(lines)])
