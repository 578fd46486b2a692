"""The options that several commands have, each with its help text; those that go together as one class."""

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from transformers import PreTrainedModel, PreTrainedTokenizerBase, logging

import hf_specdec
from hf_specdec.errors import ConfigError, SpecError
from hf_specdec.loading import embedded
from hf_specdec.loading.checkpoints.tokenizers import draft_tokenizers, load_tokenizer
from hf_specdec.loading.published import folder_of
from hf_specdec.methods.common.config import SpecConfig, check_at_least, check_temperature
from hf_specdec.methods.common.draft_head import DraftHead
from hf_specdec.methods.registry import resolve
from hf_specdec.tools.cli.inputs import check_attention, check_precision, load_draft, set_threads
from hf_specdec.tools.cli.method import check_draft_options, describe_methods, loads_draft, read_method
from hf_specdec.tools.cli.where import Where, read_where
from hf_specdec.tools.command_errors import note

ModelPath = Annotated[
    str | None, typer.Option("--model", help="Folder, hub name or smollm2. Default: the embedded target.")
]
DraftModelPath = Annotated[
    str | None,
    typer.Option(
        "--draft-model",
        "--assistant-model",
        "--head",
        help="Folder or hub name of a smaller model or a draft head, or smollm2-head. A model may have a tokenizer of "
        "its own. Default: the embedded draft or head, for the embedded target.",
    ),
]
Dtype = Annotated[
    str, typer.Option("--dtype", help="Precision of the weights: auto, fp32, bf16, fp16, fp8, int8, nf4.")
]
DraftDtype = Annotated[
    str | None, typer.Option("--draft-dtype", help="Precision of the draft model. Default: as --dtype.")
]
AttnImplementation = Annotated[
    str | None,
    typer.Option(help="Attention of the target: sdpa, eager, xformers, flash_attention_2... Default: transformers'."),
]
DEVICE_MAPS = "auto, balanced, balanced_low_0, sequential (accelerate's), a device, disk, or JSON of parts and devices"
DeviceMap = Annotated[
    str | None,
    typer.Option(
        help=f"Where the target goes: {DEVICE_MAPS}. Default: the device lists, else the GPUs if there are any."
    ),
]
MaxMemory = Annotated[str | None, typer.Option(help='With --device-map auto: memory by device, \'{"0": "20GB"}\'.')]
OffloadFolder = Annotated[Path | None, typer.Option(help="With --device-map: where weights that fit nowhere else go.")]
SpecMemoryFile = Annotated[
    Path | None,
    typer.Option(
        "--spec-memory",
        help="With auto: what it remembers, loaded from this file if it is there and saved to it at the end, also of "
        "an interrupted run. It holds the texts' tokens. Of several processes, the first one saves.",
    ),
]
PromptLookupForm = Annotated[
    str | None,
    typer.Option(
        "--prompt-lookup-config",
        "--ngram-config",
        help="Prompt lookup in the list form: draft length, n-gram size, devices of the model; for example "
        '"[10,2,[0]]".',
    ),
]
LookaheadForm = Annotated[
    str | None,
    typer.Option(
        "--lookahead-config",
        help='Lookahead in the list form: window, n-gram and verification set sizes; for example "[7,7,7]".',
    ),
]
DraftModelForm = Annotated[
    str | None,
    typer.Option(
        "--draft-model-config",
        "--draft-target-model-config",
        help="A draft model in the list form: draft length, devices of the draft, devices of the target, "
        'use_logits; for example "[4,[0],[1],False]".',
    ),
]
EngineName = Annotated[
    str | None, typer.Option("--engine", help="loop: this package's loop. assisted: transformers' assisted decoding.")
]
MaxNewTokens = Annotated[int, typer.Option("--max-new-tokens", min=1, help="Most tokens to generate.")]
Seed = Annotated[int | None, typer.Option("--seed", help="With --do-sample: the same seed draws the same text.")]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON document.")]


@dataclass(frozen=True, slots=True)
class ModelOptions:
    """The model, as the option that every command has, or as an argument."""

    model_argument: Annotated[
        str | None, typer.Argument(metavar="MODEL", help="The model, as with --model.", show_default=False)
    ] = None
    model: ModelPath = None

    @property
    def chosen(self) -> str | None:
        """Folder or hub name; `None` for the embedded target.

        Raises:
            ConfigError: there are two.
        """
        if self.model is not None and self.model_argument is not None:
            rule = f"must be unset with the argument {self.model_argument!r}"
            raise ConfigError("--model", rule, self.model, "Name the model once.")
        return self.model_argument if self.model is None else self.model


@dataclass(frozen=True, slots=True)
class Loaded:
    """A target, enabled and placed, with its tokenizer and what placed it."""

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    where: Where


@dataclass(frozen=True, slots=True)
class LoadOptions:
    """Loading of the target, and its devices."""

    attn_implementation: AttnImplementation = None
    threads: Annotated[
        int | None, typer.Option(min=1, help="CPU threads. Default: 1 for the embedded target, else torch's choice.")
    ] = None
    device_map: DeviceMap = None
    max_memory: MaxMemory = None
    offload_folder: OffloadFolder = None
    plain_kernels: Annotated[
        bool,
        typer.Option(
            "--plain-kernels",
            help="Without speculation, too, compute by this package's CPU kernels: in bf16 and fp16 both texts are the "
            "same then.",
        ),
    ] = False

    def load(
        self,
        path: str | None,
        dtype: str,
        config: SpecConfig | None = None,
        *,
        tensor_parallel: bool = False,
        device: torch.device | None = None,
    ) -> Loaded:
        """Load the target; see `read_where` for the arguments."""
        check_precision("--dtype", dtype)
        check_attention(self.attn_implementation)
        set_threads(path, self.threads)
        given, attention = (self.device_map, self.max_memory, self.offload_folder), self.attn_implementation
        where = read_where(*given, config, tensor_parallel=tensor_parallel, device=device)
        folder = embedded.path("target") if path is None else folder_of(path)
        if path is None or not sys.stderr.isatty():
            logging.disable_progress_bar()
        try:
            model = hf_specdec.AutoModelForCausalLM.from_pretrained(
                folder, precision=dtype, attn_implementation=attention, **where.target
            )
        except (ImportError, ValueError) as error:
            is_of_another = not isinstance(error, ImportError) and "attn_implementation" not in str(error)
            if attention is None or isinstance(error, SpecError) or is_of_another:
                raise
            note(f"transformers: {error}", "dim")
            rule = "must be installed" if isinstance(error, ImportError) else "must be one that this model can use"
            raise ConfigError(
                "--attn-implementation", rule, attention, "Use sdpa or eager, or leave it out."
            ) from error
        hf_specdec.enable(model, plain_kernels=self.plain_kernels)
        return Loaded(model, load_tokenizer(folder), where)


LIST_FORMS = ("prompt_lookup_config", "lookahead_config", "draft_model_config", "auto_config")


@dataclass(frozen=True, slots=True)
class MethodOptions:
    """Method, its configuration and its draft model."""

    spec_method: Annotated[
        str | None,
        typer.Option(
            help=f"How to draft. {describe_methods()}; none: transformers' own loop. Default: the method that the "
            "other options belong to, else auto."
        ),
    ] = None
    prompt_lookup_config: PromptLookupForm = None
    lookahead_config: LookaheadForm = None
    draft_model_config: DraftModelForm = None
    auto_config: Annotated[
        str | None,
        typer.Option(help="Auto's parameters, as JSON or Python: '{\"num_nodes\": 16}'."),
    ] = None
    spec_config: Annotated[
        str | None, typer.Option(help="The method's parameters, as JSON or Python: '{\"num_branches\": 4}'.")
    ] = None
    draft_model: DraftModelPath = None
    draft_dtype: DraftDtype = None

    def read(
        self, path: str | None, *, engine: str | None = None, memory: Path | None = None
    ) -> tuple[str | None, SpecConfig | None]:
        """The method's own name and its configuration, checked; see `read_method`.

        Args:
            path: of the target; `None` is the embedded one, which has a draft model.
        """
        method, config = read_method(
            self.spec_method,
            list_forms={name: getattr(self, name) for name in LIST_FORMS},
            spec_config=self.spec_config,
            engine=engine,
            draft_model=self.draft_model,
            memory=memory,
        )
        if self.draft_dtype is not None:
            check_precision("--draft-dtype", self.draft_dtype)
        check_draft_options(method, config, model=path, draft_model=self.draft_model, draft_dtype=self.draft_dtype)
        return method, config

    @property
    def has_config(self) -> bool:
        """True where an option gives the method's parameters."""
        return any(getattr(self, name) is not None for name in ("spec_config", *LIST_FORMS))

    def arguments(self, method: str | None, config: SpecConfig | None, dtype: str, target: Loaded) -> dict[str, Any]:
        """Keyword arguments of `generate` for what `read` gave, a draft model loaded next to the target among them.

        A draft model with a tokenizer of its own brings it, as `assistant_tokenizer`, and the target's.
        """
        if method is None:
            return {}
        how: dict[str, Any] = {"spec_method": method, "spec_config": config}
        if loads_draft(method, config, self.draft_model):
            device_of_draft = target.where.device_of_draft(target.model)
            draft = load_draft(
                self.draft_model, self.draft_dtype or dtype, config, device_of_draft, method=method, target=target.model
            )
            if resolve(method).needs_draft_head and not isinstance(draft, DraftHead):
                rule = f"must be a draft head with --spec-method {method}"
                remedy = "Is it a model? --spec-method draft_model takes one."
                raise ConfigError("--draft-model", rule, self.draft_model, remedy)
            how |= {"assistant_model": draft, **draft_tokenizers(draft, self.draft_model, target.tokenizer)}
        return how


@dataclass(frozen=True, slots=True)
class SamplingOptions:
    """Choice of tokens."""

    do_sample: Annotated[bool, typer.Option("--do-sample", help="Sample instead of taking the likeliest token.")] = (
        False
    )
    temperature: Annotated[float | None, typer.Option(help="With --do-sample.")] = None
    top_p: Annotated[float | None, typer.Option(help="With --do-sample.")] = None
    top_k: Annotated[int | None, typer.Option(help="With --do-sample.")] = None

    def read(self) -> dict[str, Any]:
        """Keyword arguments of `generate`."""
        options = {"temperature": self.temperature, "top_p": self.top_p, "top_k": self.top_k}
        given = {name: value for name, value in options.items() if value is not None}
        if given and not self.do_sample:
            name, value = next(iter(given.items()))
            raise ConfigError(f"--{name.replace('_', '-')}", "must come with --do-sample", value, "Add --do-sample.")
        check_temperature("--temperature", self.temperature, "Without --do-sample the likeliest is taken.")
        if self.top_p is not None and not 0.0 <= self.top_p <= 1.0:
            raise ConfigError("--top-p", "must be a number from 0.0 to 1.0", self.top_p, "1.0 leaves no token out.")
        if self.top_k is not None:
            check_at_least("--top-k", self.top_k, 0, "0 leaves no token out.")
        return {"do_sample": self.do_sample, **given}
