"""`hf-specdec bench`: ways to generate, side by side on the same prompts. Thin over `hf_specdec.tools.bench`."""

import math
import time
from pathlib import Path
from typing import Annotated, Any

import typer

from hf_specdec.errors import ConfigError
from hf_specdec.tools.bench.header import make_header
from hf_specdec.tools.bench.page import check_page
from hf_specdec.tools.bench.prompts import load_prompts
from hf_specdec.tools.bench.records import Records, read_records
from hf_specdec.tools.bench.rows import TRANSFORMERS, default_names, make_rows
from hf_specdec.tools.bench.run import BenchSettings
from hf_specdec.tools.bench.table import check_pandas
from hf_specdec.tools.cli.measured import measure_and_print, print_result
from hf_specdec.tools.cli.models import load_measured
from hf_specdec.tools.cli.options import MeasuredModelOptions
from hf_specdec.tools.cli.spread import spread


@spread
def bench(
    *,
    loading: MeasuredModelOptions,
    row: Annotated[list[str] | None, typer.Option(help="A way to generate. Repeat for more.")] = None,
    prompts: Annotated[list[str] | None, typer.Option(help="File or folder. Repeat for more.")] = None,
    limit: Annotated[int | None, typer.Option(help="Most prompts, of all tasks in turn.")] = None,
    settings: BenchSettings,
    rounds: Annotated[int, typer.Option(help="Timed rounds.")] = 3,
    max_minutes: Annotated[float, typer.Option(help="No call begins later.", show_default=False)] = math.inf,
    output: Annotated[Path | None, typer.Option(help="File of records (.jsonl).")] = None,
    page: Annotated[Path | None, typer.Option(help="Page of results (.md) and figure.")] = None,
    show: Annotated[Path | None, typer.Option(help="Records to print; measure nothing.")] = None,
    by_cpu_time: Annotated[bool, typer.Option("--by-cpu-time", help="Speeds of processor time.")] = False,
    against: Annotated[str, typer.Option(help="Row that has speed 1.", show_default=False)] = TRANSFORMERS,
) -> None:
    """Measure ways to generate on the same prompts in turn, next to transformers' generate and plain decoding.

    A --row is a method (auto, auto+head, auto:num_nodes=16,pool=request), or
    transformers:prompt_lookup or transformers:assistant. By default those run
    that say most, on the embedded model, on one thread of a CPU. The exit code is
    1 if a row gives other texts in fp32 than it promises, and 130 after Ctrl-C.
    The same command with the same --output goes on.
    """
    end = time.monotonic() + 60 * max_minutes
    check_pandas()
    if page is not None:
        check_page(page)
    printing: dict[str, Any] = {"page": page, "by_cpu_time": by_cpu_time, "against": against}
    if show is not None:
        print_result(*read_records(show, "show"), (), **printing)
        return
    chosen = load_prompts(prompts or (), limit=limit)
    loaded = load_measured(loading, threads=1)
    rows = make_rows(row or default_names(loaded), loaded)
    if against not in (names := [each.name for each in rows]):
        raise ConfigError("against", "must be a row of this run", against, f"One of {names}.")
    records, seconds = Records(make_header(loaded, settings), output), end - time.monotonic()
    measure_and_print(loaded, chosen, rows, settings, records, printing, rounds=rounds, max_seconds=seconds)
