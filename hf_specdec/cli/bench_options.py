"""The options of `hf-specdec bench`, with their help."""

from pathlib import Path
from typing import Annotated

import typer

from hf_specdec.methods.registry import METHODS

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
        f"(prompt_lookup:num_branches=4), auto+draft_model, token_recycling, transformers:prompt_lookup, "
        f"transformers:assistant, module:Class, or default for all there are. Repeat for more. Default: default.",
    ),
]
DraftModel = Annotated[
    str | None,
    typer.Option(
        "--draft-model",
        "--assistant",
        help="Draft model of the rows draft_model, auto+draft_model and transformers:assistant. Default: the embedded "
        "draft, for the embedded target.",
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
        "--dtype",
        help="Precision: auto, fp32, bf16, fp16, fp8, int8, nf4. Default: fp32 for the embedded target, else auto.",
    ),
]
Threads = Annotated[int | None, typer.Option("--threads", min=1, help="CPU threads. Default: 1 on a CPU.")]
Limit = Annotated[int | None, typer.Option("--limit", min=1, help="Most prompts, taken from the tasks in turn.")]
LimitPerTask = Annotated[int | None, typer.Option("--limit-per-task", min=1, help="Most prompts of each task.")]
RandomTokens = Annotated[
    str | None,
    typer.Option(
        "--random-tokens",
        help="COUNTxLENGTH: also COUNT prompts of LENGTH random tokens, a task of their own; for example 8x64.",
    ),
]
Against = Annotated[
    list[str] | None,
    typer.Option(
        "--against", help="A row that the others are compared with, task by task, beside generate; repeat for more."
    ),
]
Rounds = Annotated[int, typer.Option("--rounds", min=1, help="Timed rounds, after one that warms up.")]
DoSample = Annotated[
    bool | None,
    typer.Option("--do-sample/--no-do-sample", help="Sampled rows only, or greedy rows only. Default: both."),
]
Temperature = Annotated[float, typer.Option("--temperature", help="Of the sampled rows.")]
Seed = Annotated[int, typer.Option("--seed", help="Of the sampled rows: round r draws from seed + r.")]
Markdown = Annotated[bool, typer.Option("--markdown", help="Print markdown.")]
Output = Annotated[
    Path | None,
    typer.Option(
        "--output", help="Also write the JSON document here, while measuring; as JSON lines if it ends in .jsonl."
    ),
]
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
