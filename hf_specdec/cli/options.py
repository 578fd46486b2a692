"""The options that commands share, each with its help text."""

from typing import Annotated

import typer

__all__ = [
    "Compare",
    "DoSample",
    "Dtype",
    "EngineName",
    "Json",
    "MaxNewTokens",
    "ModelPath",
    "Prompt",
    "PromptLookup",
    "Rounds",
    "Seed",
    "SpecConfigText",
    "SpecMethod",
    "Temperature",
    "Threads",
    "TopK",
    "TopP",
]

Prompt = Annotated[
    str | None,
    typer.Argument(help="Text to continue; `-` reads stdin. Default: piped stdin, else built-in Python code."),
]
ModelPath = Annotated[str | None, typer.Option("--model", help="Folder or hub name. Default: the embedded target.")]
Dtype = Annotated[str, typer.Option("--dtype", help="Precision of the weights: auto, fp32, bf16, fp16.")]
Threads = Annotated[
    int | None,
    typer.Option("--threads", min=1, help="CPU threads. Default: 1 for the embedded target, else torch's choice."),
]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON document.")]

SpecMethod = Annotated[
    str,
    typer.Option(
        "--spec-method",
        help="How to draft: prompt_lookup (ngram), or plain for this package's loop without drafts, "
        "or none for transformers' own loop.",
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
        help='The list form: draft length, n-gram size, devices of the model; for example "[10,2,[0]]".',
    ),
]
EngineName = Annotated[
    str | None,
    typer.Option("--engine", help="loop: this package's loop. assisted: transformers' assisted decoding."),
]
MaxNewTokens = Annotated[int, typer.Option("--max-new-tokens", help="Most tokens to generate.")]
DoSample = Annotated[bool, typer.Option("--do-sample", help="Sample instead of taking the likeliest token.")]
Temperature = Annotated[float | None, typer.Option("--temperature", help="With --do-sample.")]
TopP = Annotated[float | None, typer.Option("--top-p", help="With --do-sample.")]
TopK = Annotated[int | None, typer.Option("--top-k", help="With --do-sample.")]
Seed = Annotated[int | None, typer.Option("--seed", help="With --do-sample: the same seed draws the same text.")]
Compare = Annotated[
    bool,
    typer.Option("--compare", help="Set the method beside plain generate and transformers' prompt lookup."),
]
Rounds = Annotated[int, typer.Option("--rounds", min=1, help="With --compare: timed rounds after the warm-up.")]
