"""A measurement of `bench` and of `generate --compare`: run, and printed as far as it came."""

import copy
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import typer

from hf_specdec.engine.model_state import state_of
from hf_specdec.errors import ConfigError
from hf_specdec.tools.bench.header import describe, make_header
from hf_specdec.tools.bench.loaded_model import LoadedModel
from hf_specdec.tools.bench.page import write_page
from hf_specdec.tools.bench.prompts import Prompt
from hf_specdec.tools.bench.records import Records
from hf_specdec.tools.bench.rows import ASSISTANT, LOOKUP, LOOKUP_NUM_TOKENS, TRANSFORMERS, Row, base_rows
from hf_specdec.tools.bench.run import BenchSettings, measure
from hf_specdec.tools.bench.table import check_pandas, has_speeds, notes, show, speed_table, unequal_rows
from hf_specdec.tools.cli.job import Job
from hf_specdec.tools.cli.report import print_json, progress_bar, stdout_console
from hf_specdec.tools.command_errors import INTERRUPTED, note

HALVES = ("bfloat16", "float16")
OTHER_KERNELS = "torch rounds {dtype} otherwise than this package's kernels: near ties fall otherwise in its texts."


def measure_and_print(
    loaded: LoadedModel,
    prompts: Sequence[Prompt],
    rows: Sequence[Row],
    settings: BenchSettings,
    records: Records,
    printing: Mapping[str, Any],
    **kwargs: Any,
) -> None:
    """Measure, by `kwargs` of `measure`, and print; after Ctrl-C, or where the time is up, what is measured by then."""
    end = None
    try:
        with progress_bar() as progress:
            if not measure(loaded, prompts, rows, settings, records, progress=progress, **kwargs):
                end = "the time is up"
    except KeyboardInterrupt:
        end = "interrupted"
    is_timed = has_speeds(records.records)
    if end is not None:
        state = "what is measured follows" if is_timed else "no round is timed yet"
        note(f"{end}: {state}{'' if records.path is None else '; the same command goes on'}", "yellow")
    if is_timed:
        print_result(records.header, records.records, rows, **printing)
    if end == "interrupted":
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
    """Print the header, the table and its notes, also on a page; exit with 1 where a row broke its promise."""
    table = speed_table(records, **options)
    if as_json:
        speeds = table.astype(object).where(table.notna(), None).to_dict("index")
        print_json({"header": header, "rows": [{"row": name, **fields} for name, fields in speeds.items()]})
    else:
        text = [*describe(header), "", show(table, stdout_console().width), "", *notes(records, **options)]
        if header["dtype"] in HALVES and table.get("equal", {}).get(TRANSFORMERS, 1.0) < 1.0:
            text.append(OTHER_KERNELS.format(dtype=header["dtype"]))
        typer.echo("\n".join(text))
    if page is not None:
        for path in write_page(page, header, records, **options):
            note(f"wrote {path}", "dim")
    if names := unequal_rows(table, rows, dtype=header["dtype"], do_sample=header["settings"]["do_sample"]):
        note(f"error: {', '.join(names)} gave other texts than plain decoding", "red")
        raise typer.Exit(1)


def compare_and_print(job: Job, prompts: Sequence[Prompt], rounds: int, *, as_json: bool) -> None:
    """Continue a prompt, then print the table of the ways to continue it."""
    check_pandas()
    if job.method["spec_method"] is None:
        raise ConfigError("compare", "must come with a method", "none", "Use --spec-method prompt_lookup.")
    state = copy.deepcopy(state_of(job.loaded.model).method_state)  # so that no call drafts from the answer
    if not as_json:
        job.write(prompts[0])
        typer.echo()
    settings = BenchSettings(seed=job.seed or 0, **job.options)
    records = Records(make_header(job.loaded, settings))
    printing, kwargs = {"as_json": as_json}, {"rounds": rounds, "method_state": state}
    measure_and_print(job.loaded, prompts, _rows(job), settings, records, printing, **kwargs)


def _rows(job: Job) -> list[Row]:
    """The method with its counterpart of transformers, next to the rows of every measurement."""
    method, config = job.method, job.method["spec_config"]
    ours = Row(str(method["spec_method"]), method, is_seed_exact=config.is_seed_exact)
    if job.loaded.draft_model is not None:
        name, kwargs = ASSISTANT, job.loaded.assistant_kwargs("draft_model")
    else:
        name, kwargs = LOOKUP, {"prompt_lookup_num_tokens": getattr(config, "max_draft_len", LOOKUP_NUM_TOKENS)}
    theirs = Row(name, kwargs, is_transformers=True, is_seed_exact=False)
    return [*base_rows(), theirs, *([] if ours.name == "plain" else [ours])]
