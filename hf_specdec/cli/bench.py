"""`hf-specdec bench`: speeds, costs and replays that a stranger can rerun. Thin over `hf_specdec.bench`."""

import sys
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from transformers import logging

from hf_specdec.bench.document import flagged, read_document, write_document
from hf_specdec.bench.prompts import load_prompts
from hf_specdec.bench.rows import default_rows, named_rows
from hf_specdec.bench.run import Bench, BenchSettings
from hf_specdec.bench.subject import Subject, load_subject, pick_device
from hf_specdec.bench.widen import read_size
from hf_specdec.cli import options
from hf_specdec.cli.bench_output import progress_bar, show
from hf_specdec.cli.report import note, reports_errors
from hf_specdec.errors import ConfigError

__all__ = ["bench"]

INTERRUPTED = 130

Prompts = Annotated[
    list[str] | None,
    typer.Option("--prompts", help="File or folder of prompts; repeat for more. Default: the built-in set."),
]
RowNames = Annotated[
    list[str] | None,
    typer.Option(
        "--row",
        help="What to measure beside generate: a method, a method with its configuration "
        "('prompt_lookup={\"num_branches\": 4}'), transformers:prompt_lookup, transformers:assistant, "
        "or module:Class. Repeat for more. Default: all.",
    ),
]
Assistant = Annotated[
    str | None, typer.Option("--assistant", help="Assistant for transformers:assistant. Default: the embedded draft.")
]
Widen = Annotated[
    str | None, typer.Option("--widen", help="HIDDENxLAYERS: widen the model to this size, its function unchanged.")
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


@reports_errors
def bench(
    model: options.ModelPath = None,
    prompts: Prompts = None,
    row: RowNames = None,
    assistant: Assistant = None,
    widen: Widen = None,
    dtype: Dtype = None,
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
) -> None:
    """Measure ways to generate against plain generate, on the same prompts in turn.

    The exit code is 1 if a row gives other tokens than it promises, 130 if the run is interrupted; what was measured
    is printed all the same.
    """
    modes = {None: ("greedy", "sampled"), True: ("sampled",), False: ("greedy",)}[do_sample]
    settings = BenchSettings(
        max_new_tokens=max_new_tokens, rounds=rounds, modes=modes, temperature=temperature, seed=seed
    )
    _check_output(output)
    earlier = None if resume is None else read_document(resume)
    chosen = load_prompts(prompts or (), limit=limit)
    subject = _subject(model, dtype=dtype, device=device, assistant=assistant, widen=widen, threads=threads)
    rows, left_out = default_rows(subject) if row is None else named_rows(row, subject)
    run = Bench(subject, rows, chosen, settings, left_out=left_out, document=earlier)
    was_interrupted = _measure(run, output or resume)
    show(run.document, as_json=json, as_markdown=markdown)
    if was_interrupted:
        raise typer.Exit(INTERRUPTED)
    if flagged(run.document):
        note("error: a row gave other tokens than it promises; see NOT EQUAL", "red")
        raise typer.Exit(1)


def _subject(
    path: str | None,
    *,
    dtype: str | None,
    device: str | None,
    assistant: str | None,
    widen: str | None,
    threads: int | None,
) -> Subject:
    sys.path.insert(0, str(Path.cwd()))  # for module:Class
    logging.disable_progress_bar()
    size = None if widen is None else read_size(widen)
    where = pick_device(device)
    if threads is not None or where.type == "cpu":
        torch.set_num_threads(threads or 1)
    subject = load_subject(path, dtype=dtype, device=where, assistant=assistant, widen_to=size)
    if "widening" in subject.facts:
        difference = subject.facts["widening"]["largest_logit_difference"]
        note(f"widened to {widen}: largest difference of the logits {difference:.1e}", "dim")
    return subject


def _measure(run: Bench, path: Path | None) -> bool:
    """Run with a progress bar and return whether it was interrupted; `path` always holds what there is."""

    def save(document: dict[str, Any]) -> None:
        if path is not None:
            write_document(document, path)

    try:
        with progress_bar() as progress:
            run.run(progress, save)
    except KeyboardInterrupt:
        if not run.document["records"] and not run.document["probes"]:
            raise
        note("interrupted: what has been measured follows" + (f"; continue with --resume {path}" if path else ""))
        return True
    finally:
        save(run.document)
    return False


def _check_output(path: Path | None) -> None:
    if path is not None and not path.absolute().parent.is_dir():
        raise ConfigError("output", "must lie in an existing folder", str(path), "Make the folder first.")
