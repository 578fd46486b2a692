"""`hf-specdec bench`: measurements that a stranger can rerun. Thin over `hf_specdec.tools.bench`."""

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import typer

from hf_specdec.tools.bench.naming import is_import
from hf_specdec.tools.bench.page import write_page
from hf_specdec.tools.bench.plots import plot_document
from hf_specdec.tools.bench.rows import DEFAULT
from hf_specdec.tools.bench.run import Bench
from hf_specdec.tools.bench.speeds import NOT_EQUAL, flagged, summarize_again
from hf_specdec.tools.bench.tables import facts, markdown, notes, read_document, tables
from hf_specdec.tools.cli.bench_file import DocumentFile
from hf_specdec.tools.cli.bench_models import ModelsOptions
from hf_specdec.tools.cli.bench_options import OutputOptions, PromptOptions, RunOptions
from hf_specdec.tools.cli.report import note_interrupt, print_json, print_table, progress_bar, stdout_console
from hf_specdec.tools.cli.spread import spread
from hf_specdec.tools.command_errors import INTERRUPTED, note

Document = dict[str, Any]


@dataclass(frozen=True, slots=True)
class _Asked:
    """All options of a call."""

    models: ModelsOptions
    prompts: PromptOptions
    run: RunOptions
    output: OutputOptions
    file: DocumentFile


@spread
def bench(models: ModelsOptions, prompts: PromptOptions, run: RunOptions, output: OutputOptions) -> None:
    """Measure ways to generate against plain generate, on the same prompts in turn.

    The exit code is 1 if a row gives other tokens than it promises, 130 if the run is interrupted; what was measured
    is printed all the same.
    """
    if any(is_import(name) for name in run.row or ()) and str(Path.cwd()) not in sys.path:
        sys.path.insert(0, str(Path.cwd()))  # where `module:Class` is looked for as well
    run.check()
    output.check()
    file = DocumentFile(output.resume, "resume") if output.output is None else DocumentFile(output.output, "output")
    document = _measured(_Asked(models, prompts, run, output, file))
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
    if flagged(document):
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
    file = asked.file
    try:
        file.document = _speeds(asked) if asked.output.show is None else _show(asked)
    except KeyboardInterrupt:
        hint = f"--resume {file.path} continues" if file.path is not None else "with --output it could be continued"
        if file.document is None:
            raise
        note_interrupt(hint)
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


def _show(asked: _Asked) -> Document:
    assert asked.output.show is not None
    document = read_document(asked.output.show, "show")
    summarize_again(document, asked.run.against, asked.run.by_cpu_time)
    return document
