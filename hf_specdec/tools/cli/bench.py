"""`hf-specdec bench`: measurements that a stranger can rerun. Thin over `hf_specdec.tools.bench`."""

import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import typer

from hf_specdec.tools.bench.cost import measure_cost
from hf_specdec.tools.bench.document import SPEEDS
from hf_specdec.tools.bench.many import measure_many
from hf_specdec.tools.bench.naming import is_import
from hf_specdec.tools.bench.page import write_page
from hf_specdec.tools.bench.plots import plot_document
from hf_specdec.tools.bench.replay import read_records
from hf_specdec.tools.bench.replay_rows import replay_rows
from hf_specdec.tools.bench.rows import DEFAULT
from hf_specdec.tools.bench.run import Bench
from hf_specdec.tools.bench.speeds import NOT_EQUAL, flagged, summarize_again
from hf_specdec.tools.bench.steps import measure_steps
from hf_specdec.tools.bench.tables import facts, markdown, notes, read_document, tables
from hf_specdec.tools.cli.bench_file import DocumentFile
from hf_specdec.tools.cli.bench_models import ModelsOptions
from hf_specdec.tools.cli.bench_options import KindOptions, OutputOptions, PromptOptions, RunOptions, check_unread
from hf_specdec.tools.cli.report import note_interrupt, print_json, print_table, progress_bar, stdout_console
from hf_specdec.tools.cli.spread import spread
from hf_specdec.tools.command_errors import INTERRUPTED, note

COST_CONTEXTS, STEPS_CONTEXTS, MANY_ROWS = (128, 512), (1_000, 10_000, 100_000), (8,)

Document = dict[str, Any]


@dataclass(frozen=True, slots=True)
class _Asked:
    """All options of a call."""

    models: ModelsOptions
    prompts: PromptOptions
    run: RunOptions
    output: OutputOptions
    kind: KindOptions
    file: DocumentFile


@spread
def bench(
    models: ModelsOptions, prompts: PromptOptions, run: RunOptions, output: OutputOptions, kind: KindOptions
) -> None:
    """Measure ways to generate against plain generate, on the same prompts in turn.

    The exit code is 1 if a row gives other tokens than it promises, 130 if the run is interrupted; what was measured
    is printed all the same.
    """
    if any(is_import(name) for name in run.row or ()) and str(Path.cwd()) not in sys.path:
        sys.path.insert(0, str(Path.cwd()))  # where `module:Class` is looked for as well
    run.check()
    output.check(kind.chosen)
    check_unread(kind.chosen, models, prompts, run, kind)
    file = DocumentFile(output.resume, "resume") if output.output is None else DocumentFile(output.output, "output")
    document = _measured(_Asked(models, prompts, run, output, kind, file))
    _show_document(document, output)
    file.check()
    if output.plot is not None:
        for path in plot_document(document, output.plot):
            note(f"wrote {path}", "dim")
    if output.page is not None:
        for path in write_page(document, output.page):
            note(f"wrote {path}", "dim")
    if not document.get("is_complete", True):
        raise typer.Exit(INTERRUPTED)
    if document["kind"] == SPEEDS and flagged(document):
        note("error: a row gave other tokens than it promises; see NOT EQUAL", "red")
        raise typer.Exit(1)


def _show_document(document: Document, output: OutputOptions) -> None:
    """Print a document in the form asked for."""
    if output.json:
        print_json(document)
    elif output.markdown:
        sys.stdout.write(markdown(document))
    else:
        console = stdout_console()
        for line in facts(document):
            console.print(line, style="dim", markup=False, highlight=False, soft_wrap=True)
        for table in tables(document):
            print_table(table)
        for line in notes(document):
            style = "bold red" if line.startswith(NOT_EQUAL) else "dim"
            console.print(line, style=style, markup=False, highlight=False, soft_wrap=True)


def _measured(asked: _Asked) -> Document:
    """Measure; an interrupt leaves the rows so far, in the document and in the file."""
    kind, file = asked.kind.chosen, asked.file
    try:
        file.document = MEASURED[kind](asked)
    except KeyboardInterrupt:
        hint = f"--resume {file.path} continues" if file.path is not None else "with --output it could be continued"
        if file.document is None:
            raise
        note_interrupt(hint if kind == SPEEDS else "")
    finally:
        if file.document is not None:  # else what is there stays
            file.close(file.document)
    return file.document


def _speeds(asked: _Asked) -> Document:
    run, output = asked.run, asked.output
    loaded, prompts = asked.models.load(), asked.prompts.load_batched()
    earlier = None if output.resume is None else read_document(output.resume, "resume")
    how: dict[str, Any] = {"against": run.against or (), "by_cpu_time": run.by_cpu_time, "document": earlier}
    bench = Bench(loaded, prompts, run.settings(), rows=run.rows or [DEFAULT], **how)
    with progress_bar() as progress:
        return bench.run(progress, asked.file.save)


def _cost(asked: _Asked) -> Document:
    loaded, lengths = asked.models.load(), asked.kind.context_length or COST_CONTEXTS
    rounds, seed, save = asked.run.rounds, asked.run.seed, asked.file.save
    with progress_bar() as progress:
        return measure_cost(loaded, context_lengths=lengths, rounds=rounds, seed=seed, progress=progress, save=save)


def _replay(asked: _Asked) -> Document:
    assert asked.kind.replay is not None
    with progress_bar() as progress:
        return replay_rows(read_records(asked.kind.replay), asked.run.rows or None, progress, asked.file.save)


def _many(asked: _Asked) -> Document:
    names, sizes = asked.run.rows or ["prompt_lookup"], asked.prompts.batch_size or MANY_ROWS
    prompts, loaded, num_tokens = asked.prompts.load(), asked.models.load_one(), asked.run.max_new_tokens
    return measure_many(loaded, prompts, names, batch_sizes=sizes, max_new_tokens=num_tokens, save=asked.file.save)


def _steps(asked: _Asked) -> Document:
    lengths = asked.kind.context_length or STEPS_CONTEXTS
    prompts, loaded = asked.prompts.load(), asked.models.load_one()
    return measure_steps(loaded, prompts, context_lengths=lengths, save=asked.file.save)


def _show(asked: _Asked) -> Document:
    assert asked.kind.show is not None
    document = read_document(asked.kind.show, "show")
    asked.output.check_kind(document["kind"])
    summarize_again(document, asked.run.against, asked.run.by_cpu_time)
    return document


MEASURED: dict[str, Callable[[_Asked], Document]] = {
    SPEEDS: _speeds,
    "cost": _cost,
    "replay": _replay,
    "many": _many,
    "steps": _steps,
    "show": _show,
}
