"""The options that commands share, each with its help text."""

from pathlib import Path
from typing import Annotated

import typer

from hf_specdec.cli.method import describe_methods

Prompt = Annotated[
    str | None,
    typer.Argument(help="Text to continue; `-` reads stdin. Default: piped stdin, else built-in Python code."),
]
ModelPath = Annotated[str | None, typer.Option("--model", help="Folder or hub name. Default: the embedded target.")]
Dtype = Annotated[
    str, typer.Option("--dtype", help="Precision of the weights: auto, fp32, bf16, fp16, fp8, int8, nf4.")
]
AttnImplementation = Annotated[
    str | None,
    typer.Option(help="Attention of the target: sdpa, eager, xformers, flash_attention_2... Default: transformers'."),
]
Threads = Annotated[
    int | None,
    typer.Option("--threads", min=1, help="CPU threads. Default: 1 for the embedded target, else torch's choice."),
]
DeviceMap = Annotated[
    str | None,
    typer.Option(
        "--device-map",
        help="Where the target goes: auto, balanced, balanced_low_0, sequential (accelerate's), a device, disk, or "
        "JSON of parts and devices. Default: the device lists, else the GPUs if there are any.",
    ),
]
MaxMemory = Annotated[
    str | None,
    typer.Option("--max-memory", help='With --device-map auto: memory by device, \'{"0": "20GB"}\'.'),
]
OffloadFolder = Annotated[
    Path | None, typer.Option("--offload-folder", help="With --device-map: where weights that fit nowhere else go.")
]
TensorParallel = Annotated[
    bool,
    typer.Option(
        "--tensor-parallel",
        help="Share the target between the processes of this launch: "
        "torchrun --nproc-per-node 2 -m hf_specdec ... --tensor-parallel.",
    ),
]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON document.")]

SpecMethod = Annotated[
    str | None,
    typer.Option(
        "--spec-method",
        help=f"How to draft. {describe_methods()}; none: transformers' own loop. Default: the method that the other "
        "options belong to, else auto.",
    ),
]
SpecConfigText = Annotated[
    str | None,
    typer.Option("--spec-config", help="The method's parameters, as JSON or Python: '{\"num_branches\": 4}'."),
]
PromptLookup = Annotated[
    str | None,
    typer.Option(
        "--prompt-lookup-config",
        "--ngram-config",
        help="Prompt lookup in the list form: draft length, n-gram size, devices of the model; for example "
        '"[10,2,[0]]".',
    ),
]
LookaheadList = Annotated[
    str | None,
    typer.Option(
        "--lookahead-config",
        help='Lookahead in the list form: window, n-gram and verification set sizes; for example "[7,7,7]".',
    ),
]
DraftModelList = Annotated[
    str | None,
    typer.Option(
        "--draft-model-config",
        "--draft-target-model-config",
        help="A draft model in the list form: draft length, devices of the draft, devices of the target, use_logits; "
        'for example "[4,[0],[1],False]".',
    ),
]
DraftModelPath = Annotated[
    str | None,
    typer.Option(
        "--draft-model",
        help="Folder or hub name of a smaller model of the same vocabulary, or of a draft head. Default: the embedded "
        "draft or head, for the embedded target.",
    ),
]
DraftDtype = Annotated[
    str | None, typer.Option("--draft-dtype", help="Precision of the draft model. Default: as --dtype.")
]
AutoConfig = Annotated[
    str | None,
    typer.Option(
        "--auto-config",
        help='Auto\'s parameters, as JSON or Python: \'{"costs": "costs.json"}\' takes what hf-specdec tune wrote.',
    ),
]
SpecMemoryFile = Annotated[
    Path | None,
    typer.Option(
        "--spec-memory",
        help="With auto: what it remembers, loaded from this file if it is there and saved to it at the end, also of "
        "an interrupted run. It holds the texts' tokens. Of several processes, the first one saves.",
    ),
]
EngineName = Annotated[
    str | None,
    typer.Option("--engine", help="loop: this package's loop. assisted: transformers' assisted decoding."),
]
PromptsFile = Annotated[
    Path | None,
    typer.Option(
        "--prompts-file",
        help="A .jsonl file (.gz too) of prompts: a string a line, or an object with prompt, question, text or turns. "
        "Needs --out.",
    ),
]
Out = Annotated[
    Path | None,
    typer.Option(
        "--out",
        help="With --prompts-file: the .jsonl file of results. A job that was interrupted goes on where it stopped.",
    ),
]
RetryFailed = Annotated[
    bool, typer.Option("--retry-failed", help="With --prompts-file: try prompts again that failed before.")
]
BatchSize = Annotated[int, typer.Option("--batch-size", min=1, help="With --prompts-file: prompts decoded together.")]
MaxNewTokens = Annotated[int, typer.Option("--max-new-tokens", help="Most tokens to generate.")]
DoSample = Annotated[bool, typer.Option("--do-sample", help="Sample instead of taking the likeliest token.")]
Temperature = Annotated[float | None, typer.Option("--temperature", help="With --do-sample.")]
TopP = Annotated[float | None, typer.Option("--top-p", help="With --do-sample.")]
TopK = Annotated[int | None, typer.Option("--top-k", help="With --do-sample.")]
Seed = Annotated[int | None, typer.Option("--seed", help="With --do-sample: the same seed draws the same text.")]
Compare = Annotated[
    bool,
    typer.Option(
        "--compare",
        help="Set the method beside plain generate and transformers' own: its prompt lookup, or its assisted "
        "generation for a draft model.",
    ),
]
Rounds = Annotated[int, typer.Option("--rounds", min=1, help="With --compare: timed rounds after the warm-up.")]
