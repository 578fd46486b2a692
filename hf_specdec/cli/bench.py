"""`hf-specdec bench`: speeds, costs and replays that a stranger can rerun. Thin over `hf_specdec.bench`."""

import time
from pathlib import Path
from typing import Any

import typer

from hf_specdec.bench.cost import measure_cost
from hf_specdec.bench.document import (
    SPEEDS,
    check_document_file,
    flagged,
    read_document,
    summarize_again,
    write_document,
)
from hf_specdec.bench.journal import Journal, is_journal
from hf_specdec.bench.naming import is_import
from hf_specdec.bench.plan import BenchSettings
from hf_specdec.bench.plots import check_matplotlib, plot_document
from hf_specdec.bench.prompts import Prompt, load_prompts, random_prompts
from hf_specdec.bench.replay import read_records
from hf_specdec.bench.replay_rows import replay_rows
from hf_specdec.bench.rows import DEFAULT
from hf_specdec.bench.run import Bench
from hf_specdec.bench.subject import Subject
from hf_specdec.cli import bench_options as given
from hf_specdec.cli import options
from hf_specdec.cli.bench_output import progress_bar, show
from hf_specdec.cli.bench_subjects import load_subjects, look_here
from hf_specdec.cli.inputs import check_seed
from hf_specdec.cli.report import note, reports_errors
from hf_specdec.errors import ConfigError

__all__ = ["bench"]

INTERRUPTED = 130
SAVE_EVERY_SECONDS = 5.0
DEFAULT_CONTEXT_LENGTHS = (128, 512)
MODES = {None: ("greedy", "sampled"), True: ("sampled",), False: ("greedy",)}  # by --do-sample


@reports_errors
def bench(
    model: given.Models = None,
    prompts: given.Prompts = None,
    row: given.RowNames = None,
    against: given.Against = None,
    draft_model: given.DraftModel = None,
    widen: given.Widen = None,
    dtype: given.Dtype = None,
    draft_dtype: options.DraftDtype = None,
    attn_implementation: options.AttnImplementation = None,
    device: given.Device = None,
    threads: given.Threads = None,
    max_new_tokens: options.MaxNewTokens = 128,
    rounds: given.Rounds = 3,
    limit: given.Limit = None,
    limit_per_task: given.LimitPerTask = None,
    random_tokens: given.RandomTokens = None,
    do_sample: given.DoSample = None,
    temperature: given.Temperature = 0.7,
    seed: given.Seed = 0,
    json: options.Json = False,
    markdown: given.Markdown = False,
    output: given.Output = None,
    resume: given.Resume = None,
    plot: given.Plot = None,
    cost: given.Cost = False,
    context_length: given.ContextLengths = None,
    replay: given.Replay = None,
    show_file: given.Show = None,
) -> None:
    """Measure ways to generate against plain generate, on the same prompts in turn.

    The exit code is 1 if a row gives other tokens than it promises, 130 if the run is interrupted; what was measured
    is printed all the same.
    """
    if any(is_import(name) for name in row or ()):
        look_here()
    check_seed(seed)
    _check(output, plot, is_speeds=show_file is None and replay is None and not cost)
    if show_file is not None:
        document = read_document(show_file)
        summarize_again(document, against)
    elif replay is not None:
        document = _replayed(replay, row, output)
    else:
        drafts: dict[str, Any] = {"draft_model": draft_model, "draft_dtype": draft_dtype}
        how: dict[str, Any] = {"dtype": dtype, "device": device, "attn_implementation": attn_implementation}
        subjects = load_subjects(model, widen, threads=threads, **drafts, **how)
        if cost:
            document = _measured_cost(subjects, context_length, rounds, seed, output)
        else:
            settings = BenchSettings(
                max_new_tokens=max_new_tokens, rounds=rounds, modes=MODES[do_sample], temperature=temperature, seed=seed
            )
            chosen = load_prompts(prompts or (), limit=limit, limit_per_task=limit_per_task)
            chosen += _random_prompts(random_tokens)
            earlier = None if resume is None else read_document(resume)
            run = Bench(subjects, chosen, settings, rows=row or [DEFAULT], against=against or (), document=earlier)
            document = _measured_speeds(run, output or resume)
    _finish(document, as_json=json, as_markdown=markdown, plot=plot)


def _measured_speeds(run: Bench, path: Path | None) -> dict[str, Any]:
    """Measure with a progress bar; an interrupt leaves what there is, in the document and in the file."""
    journal = Journal(path) if path is not None and is_journal(path) else None
    saved = time.monotonic()

    def save(document: dict[str, Any]) -> None:
        nonlocal saved
        if journal is not None:
            journal.save(document)
        elif path is not None and time.monotonic() - saved > SAVE_EVERY_SECONDS:
            write_document(document, path)
            saved = time.monotonic()

    try:
        with progress_bar() as progress:
            run.run(progress, save)
    except KeyboardInterrupt:
        if not any(entry["probes"] for entry in run.document["subjects"]):
            raise
        hint = f"--resume {path} continues" if path is not None else "with --output it could be continued"
        note(f"interrupted: what has been measured follows; {hint}")
    finally:
        if journal is not None:
            journal.close(run.document)
        elif path is not None:
            write_document(run.document, path)
    return run.document


def _random_prompts(text: str | None) -> list[Prompt]:
    """The prompts that `COUNTxLENGTH` asks for."""
    if text is None:
        return []
    count, _, length = text.partition("x")
    if not (count.isdecimal() and length.isdecimal()):
        raise ConfigError("random_tokens", "must be COUNTxLENGTH", text, "For example 8x64.")
    return random_prompts(int(count), length=int(length))


def _measured_cost(
    subjects: list[Subject], context_lengths: list[int] | None, rounds: int, seed: int, output: Path | None
) -> dict[str, Any]:
    lengths = context_lengths or DEFAULT_CONTEXT_LENGTHS
    with progress_bar() as progress:
        document = measure_cost(subjects, context_lengths=lengths, rounds=rounds, seed=seed, progress=progress)
    if output is not None:
        write_document(document, output)
    return document


def _replayed(file: Path, names: list[str] | None, output: Path | None) -> dict[str, Any]:
    with progress_bar() as progress:
        document = replay_rows(read_records(file), names, progress)
    if output is not None:
        write_document(document, output)
    return document


def _finish(document: dict[str, Any], *, as_json: bool, as_markdown: bool, plot: Path | None) -> None:
    """Print, plot, and say by the exit code how it went."""
    show(document, as_json=as_json, as_markdown=as_markdown)
    if plot is not None:
        for file in plot_document(document, plot):
            note(f"wrote {file}", "dim")
    if not document.get("is_complete", True):
        raise typer.Exit(INTERRUPTED)
    if document["kind"] == SPEEDS and flagged(document):
        note("error: a row gave other tokens than it promises; see NOT EQUAL", "red")
        raise typer.Exit(1)


def _check(output: Path | None, plot: Path | None, *, is_speeds: bool) -> None:
    """What would only show after the measurement."""
    if output is not None and is_journal(output) and not is_speeds:
        raise ConfigError("output", "must end in .json for this kind of document", str(output), "Rename it.")
    if output is not None:
        check_document_file("output", output)
    if plot is not None:
        check_matplotlib()
