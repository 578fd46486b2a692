"""`hf-specdec bench`: speeds, costs and replays that a stranger can rerun. Thin over `hf_specdec.bench`."""

import time
from pathlib import Path
from typing import Annotated, Any

import typer

from hf_specdec.bench.cost import measure_cost
from hf_specdec.bench.document import SPEEDS, flagged, read_document, write_document
from hf_specdec.bench.plan import BenchSettings
from hf_specdec.bench.plots import check_matplotlib, plot_document
from hf_specdec.bench.prompts import Prompt, load_prompts
from hf_specdec.bench.replay import read_records
from hf_specdec.bench.replay_rows import replay_rows
from hf_specdec.bench.rows import DEFAULT
from hf_specdec.bench.run import Bench
from hf_specdec.bench.subject import Subject
from hf_specdec.cli import options
from hf_specdec.cli.bench_output import progress_bar, show
from hf_specdec.cli.bench_subjects import load_subjects, look_here
from hf_specdec.cli.report import note, reports_errors
from hf_specdec.errors import ConfigError
from hf_specdec.methods import METHODS

__all__ = ["bench"]

INTERRUPTED = 130
SAVE_EVERY_SECONDS = 5.0
DEFAULT_CONTEXT_LENGTHS = (128, 512)

Models = Annotated[
    list[str] | None,
    typer.Option("--model", help="Folder or hub name; repeat for more. Default: the embedded target."),
]
Prompts = Annotated[
    list[str] | None,
    typer.Option("--prompts", help="File or folder of prompts; repeat for more. Default: the built-in set."),
]
RowNames = Annotated[
    list[str] | None,
    typer.Option(
        "--row",
        help=f"What to measure beside generate: a method ({', '.join(METHODS)}), a method with its configuration "
        f"('prompt_lookup={{\"num_branches\": 4}}'), transformers:prompt_lookup, transformers:assistant, "
        f"module:Class, or default for all there are. Repeat for more. Default: default.",
    ),
]
DraftModel = Annotated[
    str | None,
    typer.Option(
        "--draft-model",
        "--assistant",
        help="Draft model of the rows draft_model and transformers:assistant. Default: the embedded draft, for the "
        "embedded target.",
    ),
]
Widen = Annotated[
    list[str] | None,
    typer.Option(
        "--widen",
        help="HIDDENxLAYERS: measure each model widened to this size, its function unchanged; native is its own size. "
        "Repeat for more. Default: native.",
    ),
]
Device = Annotated[str | None, typer.Option("--device", help="Where it runs. Default: the accelerator, or cpu.")]
Dtype = Annotated[
    str | None,
    typer.Option(
        "--dtype", help="Precision: auto, fp32, bf16, fp16. Default: fp32 for the embedded target, else auto."
    ),
]
Threads = Annotated[int | None, typer.Option("--threads", min=1, help="CPU threads. Default: 1 on a CPU.")]
Limit = Annotated[int | None, typer.Option("--limit", min=1, help="Most prompts, taken from the tasks in turn.")]
Rounds = Annotated[int, typer.Option("--rounds", min=1, help="Timed rounds, after one that warms up.")]
DoSample = Annotated[
    bool | None,
    typer.Option("--do-sample/--no-do-sample", help="Sampled rows only, or greedy rows only. Default: both."),
]
Temperature = Annotated[float, typer.Option("--temperature", help="Of the sampled rows.")]
Seed = Annotated[int, typer.Option("--seed", help="Of the sampled rows: round r draws from seed + r.")]
Markdown = Annotated[bool, typer.Option("--markdown", help="Print markdown.")]
Output = Annotated[Path | None, typer.Option("--output", help="Also write the JSON document here, while measuring.")]
Resume = Annotated[
    Path | None, typer.Option("--resume", help="Continue an interrupted run from its document, and write it back.")
]
Plot = Annotated[Path | None, typer.Option("--plot", help="Draw the figures into this folder, as PNG and SVG.")]
Show = Annotated[Path | None, typer.Option("--show", help="Measure nothing; print or plot this document.")]
Cost = Annotated[bool, typer.Option("--cost", help="Measure what it costs to verify T tokens at once, instead.")]
Replay = Annotated[
    Path | None,
    typer.Option("--replay", help="Run drafters against recorded answers (JSONL of prompt_ids, answer_ids), instead."),
]
ContextLengths = Annotated[
    list[int] | None,
    typer.Option(
        "--context-length", min=1, help="With --cost: tokens in the cache; repeat for more. Default: 128, 512."
    ),
]


@reports_errors
def bench(
    model: Models = None,
    prompts: Prompts = None,
    row: RowNames = None,
    draft_model: DraftModel = None,
    widen: Widen = None,
    dtype: Dtype = None,
    draft_dtype: options.DraftDtype = None,
    device: Device = None,
    threads: Threads = None,
    max_new_tokens: options.MaxNewTokens = 128,
    rounds: Rounds = 3,
    limit: Limit = None,
    do_sample: DoSample = None,
    temperature: Temperature = 0.7,
    seed: Seed = 0,
    json: options.Json = False,
    markdown: Markdown = False,
    output: Output = None,
    resume: Resume = None,
    plot: Plot = None,
    cost: Cost = False,
    context_length: ContextLengths = None,
    replay: Replay = None,
    show_file: Show = None,
) -> None:
    """Measure ways to generate against plain generate, on the same prompts in turn.

    The exit code is 1 if a row gives other tokens than it promises, 130 if the run is interrupted; what was measured
    is printed all the same.
    """
    _check(output, plot)
    if show_file is not None:
        document = read_document(show_file)
    elif replay is not None:
        document = _replayed(replay, row, output)
    else:
        subjects = load_subjects(
            model, widen, dtype=dtype, device=device, draft_model=draft_model, draft_dtype=draft_dtype, threads=threads
        )
        if cost:
            document = _measured_cost(subjects, context_length, rounds, seed, output)
        else:
            modes = {None: ("greedy", "sampled"), True: ("sampled",), False: ("greedy",)}[do_sample]
            settings = BenchSettings(
                max_new_tokens=max_new_tokens, rounds=rounds, modes=modes, temperature=temperature, seed=seed
            )
            chosen = load_prompts(prompts or (), limit=limit)
            document = _measured_speeds(subjects, row, chosen, settings, output, resume)
    _finish(document, as_json=json, as_markdown=markdown, plot=plot)


def _measured_speeds(
    subjects: list[Subject],
    names: list[str] | None,
    prompts: list[Prompt],
    settings: BenchSettings,
    output: Path | None,
    resume: Path | None,
) -> dict[str, Any]:
    """Measure with a progress bar; an interrupt leaves what there is, in the document and in the file."""
    earlier = None if resume is None else read_document(resume)
    run = Bench(subjects, prompts, settings, rows=names or [DEFAULT], document=earlier)
    path = output or resume
    saved = time.monotonic()

    def save(document: dict[str, Any]) -> None:
        nonlocal saved
        if path is not None and time.monotonic() - saved > SAVE_EVERY_SECONDS:
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
        if path is not None:
            write_document(run.document, path)
    return run.document


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
    look_here()
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


def _check(output: Path | None, plot: Path | None) -> None:
    """What would only show after the measurement."""
    if output is not None and not output.absolute().parent.is_dir():
        raise ConfigError("output", "must lie in an existing folder", str(output), "Make the folder first.")
    if plot is not None:
        check_matplotlib()
