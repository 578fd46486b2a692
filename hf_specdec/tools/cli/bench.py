"""`hf-specdec bench`: ways to generate, side by side on the same prompts. Thin over `hf_specdec.tools.bench`."""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from transformers import logging

from hf_specdec.errors import ConfigError
from hf_specdec.tools.bench.header import describe, make_header
from hf_specdec.tools.bench.loaded_model import load_model
from hf_specdec.tools.bench.page import check_page, write_page
from hf_specdec.tools.bench.prompts import load_prompts
from hf_specdec.tools.bench.records import Records, read_records
from hf_specdec.tools.bench.rows import TRANSFORMERS, Row, default_names, make_rows
from hf_specdec.tools.bench.run import BenchSettings, measure
from hf_specdec.tools.bench.table import check_pandas, has_speeds, notes, show, speed_table, unequal_rows
from hf_specdec.tools.bench.widen import read_size
from hf_specdec.tools.cli.report import print_json, progress_bar, stdout_console
from hf_specdec.tools.command_errors import INTERRUPTED, note


def bench(
    *,
    model: Annotated[str | None, typer.Option(help="Folder or hub name. Default: embedded.")] = None,
    assistant_model: Annotated[list[str] | None, typer.Option(help="Draft model or head. Repeat for both.")] = None,
    dtype: Annotated[str | None, typer.Option(help="fp32, bf16, fp16, fp8, int8, nf4, auto.")] = None,
    device: Annotated[str | None, typer.Option(help="cpu, cuda, ...")] = None,
    attn_implementation: Annotated[str | None, typer.Option(help="As in transformers.")] = None,
    widen: Annotated[str | None, typer.Option(help="WIDTHxLAYERS: a larger model's cost.")] = None,
    threads: Annotated[int | None, typer.Option(help="Default: 1 on a CPU.")] = None,
    row: Annotated[list[str] | None, typer.Option(help="A way to generate. Repeat for more.")] = None,
    prompts: Annotated[list[str] | None, typer.Option(help="File or folder. Repeat for more.")] = None,
    limit: Annotated[int | None, typer.Option(help="Most prompts, of all tasks in turn.")] = None,
    batch_size: Annotated[int, typer.Option(help="Prompts decoded together.")] = 1,
    max_new_tokens: Annotated[int, typer.Option(help="Most tokens.")] = 128,
    do_sample: Annotated[bool, typer.Option("--do-sample", help="Sample the texts.")] = False,
    temperature: Annotated[float | None, typer.Option(help="With --do-sample.")] = None,
    seed: Annotated[int, typer.Option(help="With --do-sample.")] = 0,
    cache: Annotated[str, typer.Option(help="dynamic or static.")] = "dynamic",
    rounds: Annotated[int, typer.Option(help="Timed rounds.")] = 3,
    max_minutes: Annotated[float, typer.Option(help="No call begins later.", show_default=False)] = math.inf,
    output: Annotated[Path | None, typer.Option(help="File of records (.jsonl).")] = None,
    page: Annotated[Path | None, typer.Option(help="Page of results (.md) and figure.")] = None,
    show: Annotated[Path | None, typer.Option(help="Records to print; measure nothing.")] = None,
    by_cpu_time: Annotated[bool, typer.Option("--by-cpu-time", help="Speeds of processor time.")] = False,
    against: Annotated[str, typer.Option(help="Row that has speed 1.", show_default=False)] = TRANSFORMERS,
) -> None:
    """Measure ways to generate on the same prompts in turn, next to transformers' generate and plain decoding.

    A --row is transformers:prompt_lookup, transformers:assistant, or a method: auto, auto:num_nodes=16,pool=request,
    auto+head, auto+draft_model. By default those run that say most. The exit code is 1 if a row gives other texts in
    fp32 than it promises, and 130 after Ctrl-C. The same command with the same --output goes on.
    """
    check_pandas()
    if page is not None:
        check_page(page)
    options: dict[str, Any] = {"by_cpu_time": by_cpu_time, "against": against}
    if show is not None:
        header, records = read_records(show, "show")
        print_result(header, records, (), page=page, **options)
        return
    chosen = load_prompts(prompts or (), limit=limit)
    settings = BenchSettings(
        max_new_tokens=max_new_tokens,
        do_sample=do_sample,
        temperature=temperature,
        seed=seed,
        batch_size=batch_size,
        cache=cache,
    )
    if threads is not None or device == "cpu" or not torch.accelerator.is_available():
        torch.set_num_threads(threads or 1)
    logging.disable_progress_bar()
    loaded = load_model(
        model,
        dtype=dtype,
        device=device,
        assistant_models=assistant_model or (),
        widen_to=None if widen is None else read_size(widen),
        attn_implementation=attn_implementation,
    )
    rows = make_rows(row or default_names(loaded), loaded)
    if against not in [own.name for own in rows]:
        raise ConfigError("against", "must be a row of this run", against, f"One of {[own.name for own in rows]}.")
    kept = Records(make_header(loaded, settings), output)
    is_complete = True
    try:
        with progress_bar() as progress:
            measure(
                loaded, chosen, rows, settings, kept, rounds=rounds, max_seconds=60 * max_minutes, progress=progress
            )
    except KeyboardInterrupt:
        is_complete = False
        if not has_speeds(kept.records):
            raise
        note("interrupted: what has been measured follows; with --output the same command goes on", "yellow")
    print_result(kept.header, kept.records, rows, page=page, **options)
    if not is_complete:
        raise typer.Exit(INTERRUPTED)


def print_result(
    header: Mapping[str, Any],
    records: Sequence[Mapping[str, Any]],
    rows: Sequence[Row],
    *,
    page: Path | None = None,
    as_json: bool = False,
    **options: Any,
) -> None:
    """Print the header, the table and its notes; on a page too, where one is wanted.

    Args:
        rows: those that were measured.
        options: of `speed_table`.

    Raises:
        Exit: a row gave other texts than it promises (1).
    """
    table = speed_table(records, **options)
    if as_json:
        speeds = table.astype(object).where(table.notna(), None).to_dict("index")
        print_json({"header": header, "rows": [{"row": name, **fields} for name, fields in speeds.items()]})
    else:
        typer.echo(
            "\n".join([*describe(header), "", show(table, stdout_console().width), "", *notes(records, **options)])
        )
    if page is not None:
        for path in write_page(page, header, records, **options):
            note(f"wrote {path}", "dim")
    if names := unequal_rows(table, rows, dtype=header["dtype"], do_sample=header["settings"]["do_sample"]):
        note(f"error: {', '.join(names)} gave other texts than plain decoding", "red")
        raise typer.Exit(1)
