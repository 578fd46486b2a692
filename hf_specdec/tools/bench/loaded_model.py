"""A model to measure, with its tokenizer, and a draft model where there is one."""

import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import AutoConfig, PreTrainedModel, PreTrainedTokenizerBase

import hf_specdec
from hf_specdec import compat
from hf_specdec.distributed.placement import default_device, read_device, where_it_lies
from hf_specdec.errors import ConfigError, UnsupportedModelError, unknown_name
from hf_specdec.kernels.quantization.precision import DTYPES, PRECISIONS
from hf_specdec.loading import embedded
from hf_specdec.loading.checkpoints.tokenizers import load_foreign_tokenizer, load_tokenizer
from hf_specdec.loading.published import folder_of
from hf_specdec.methods.common.draft_head import DraftHead
from hf_specdec.tools.bench.widen import check_widening, widen, widen_head

EMBEDDED = "embedded target"
EMBEDDED_DRAFT = "embedded draft"


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model that is enabled, in evaluation mode and on its device.

    Attributes:
        model (`PreTrainedModel`): the target.
        tokenizer (`PreTrainedTokenizerBase`): the target's.
        name (`str`): the model's own, whatever its size.
        assistant (`PreTrainedModel | None`): the draft model, for `draft_model` and transformers' assisted generation.
        assistant_name (`str | None`): the draft model's folder or hub name.
        assistant_tokenizer (`PreTrainedTokenizerBase | None`): the draft model's, where it is not the target's.
        head (`DraftHead | None`): for the methods that draft with a head.
        facts (`dict[str, Any]`): more about it for the document, such as what widening changed.
    """

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    name: str
    assistant: PreTrainedModel | None = None
    assistant_name: str | None = None
    assistant_tokenizer: PreTrainedTokenizerBase | None = None
    head: DraftHead | None = None
    facts: dict[str, Any] = field(default_factory=dict)

    @property
    def device(self) -> torch.device:
        """Device of the inputs."""
        return compat.input_device(self.model)

    @property
    def label(self) -> str:
        """Name in documents and tables, with the size that it was widened to and its precision where it has several."""
        size, precision = self.facts.get("widening"), self.facts.get("precision")
        widths = f", {size['hidden_size']}x{size['num_layers']}" if size else ""
        return f"{self.name}{widths}" + (f", {precision}" if precision else "")

    @property
    def assisted(self) -> dict[str, Any]:
        """Arguments of `generate` for the draft model, with the tokenizers where it has one of its own."""
        own = self.assistant_tokenizer
        translated = {} if own is None else {"tokenizer": self.tokenizer, "assistant_tokenizer": own}
        return {"assistant_model": self.assistant, **translated}


def load_model(
    path: str | None = None,
    *,
    dtype: str | None = None,
    device: str | torch.device | None = None,
    assistant: str | None = None,
    assistant_dtype: str | None = None,
    head: str | None = None,
    widen_to: tuple[int, int] | None = None,
    attn_implementation: str | None = None,
    placement: Mapping[str, Any] | None = None,
) -> LoadedModel:
    """Load a model for measuring.

    Args:
        path (`str`, *optional*): folder or hub name; `None` is the embedded target, with the embedded draft as its
            assistant.
        dtype (`str`, *optional*): a precision as `from_pretrained` takes it; by default `"fp32"` for the embedded
            target and `"auto"` otherwise.
        device (`str`, *optional*): where it runs; by default the accelerator, or the CPU where there is none.
        assistant (`str`, *optional*): folder or hub name of a draft model.
        assistant_dtype (`str`, *optional*): the draft model's precision; the model's by default.
        head (`str`, *optional*): folder or hub name of a draft head for the model, loaded in the model's dtype and
            widened with it.
        widen_to (`tuple[int, int]`, *optional*): hidden size and number of layers that the model is widened to, its
            function unchanged.
        attn_implementation (`str`, *optional*): the model's attention; transformers' choice by default.
        placement (`Mapping[str, Any]`, *optional*): arguments of `from_pretrained` that place the target, such as
            `device_map` and `max_memory`, instead of `device`; drafts go where its inputs do.

    Raises:
        CheckpointError: a folder is missing or incomplete.
        ConfigError: an unknown precision, device or attention, a size that cannot be, or both a placement and
            a device or size.
        UnsupportedModelError: the model or the head cannot be widened.
    """
    precision = dtype or ("fp32" if path is None else "auto")
    own_precision = assistant_dtype or precision
    _check_precisions(dtype=precision, assistant_dtype=own_precision)
    _check_placement(placement, device, widen_to)
    where = pick_device(device)
    folder = embedded.path("target") if path is None else folder_of(path)
    draft = embedded.path("draft") if path is None and assistant is None else assistant
    model, drafting, facts = _target_and_head(folder, precision, head, widen_to, placement or {}, where)
    if attn_implementation is not None:
        _set_attention(model, attn_implementation)
    helper = None if draft is None else hf_specdec.AutoModelForCausalLM.from_pretrained(draft, precision=own_precision)
    tokenizer = load_tokenizer(folder)
    if placement:
        where, facts["devices"] = compat.input_device(model), where_it_lies(model)
    target = (model if placement else model.to(where)).eval()
    return LoadedModel(
        model=target,
        tokenizer=tokenizer,
        name=EMBEDDED if path is None else path,
        assistant=None if helper is None else helper.to(where).eval(),
        assistant_name=EMBEDDED_DRAFT if path is None and assistant is None else assistant,
        assistant_tokenizer=None if assistant is None else load_foreign_tokenizer(assistant, tokenizer),
        head=None if drafting is None else drafting.to(where),
        facts=facts,
    )


def _target_and_head(
    folder: str,
    precision: str,
    head: str | None,
    widen_to: tuple[int, int] | None,
    placement: Mapping[str, Any],
    where: torch.device,
) -> tuple[Any, DraftHead | None, dict[str, Any]]:
    """The model, its head, both at their new size where one is wanted, and what is to be told of that.

    They are made larger on the device, in seconds, where it has room for them in fp32, otherwise in the host's memory.
    """
    drafting: DraftHead | None = None
    if widen_to is None:
        model = hf_specdec.AutoModelForCausalLM.from_pretrained(folder, precision=precision, **placement)
        if head is not None:
            drafting = _head(head, model)
        return model, drafting, {}
    original = hf_specdec.AutoModelForCausalLM.from_pretrained(folder, precision="fp32")
    small = None if head is None else hf_specdec.AutoDraftHead.from_pretrained(head).float()
    try:
        large, drafting, facts = _widened(original.to(where), small, folder, precision, widen_to)
    except torch.OutOfMemoryError:
        large = None
    if large is None:  # what did not fit has been freed with the error
        large, drafting, facts = _widened(original.cpu(), small, folder, precision, widen_to)
    if where.type == "cuda":
        torch.cuda.empty_cache()  # of fp32
    return large, drafting, {"widening": facts}


def _check_precisions(**values: str) -> None:
    for name, value in values.items():
        if value not in PRECISIONS:
            raise unknown_name(name, value, PRECISIONS)


def _check_placement(
    placement: Mapping[str, Any] | None, device: str | torch.device | None, widen_to: tuple[int, int] | None
) -> None:
    """Raise where a placement meets what it cannot be combined with."""
    if not placement:
        return
    for name, value in {"device": device, "widen": widen_to}.items():
        if value is not None:
            remedy = "A placement is for checkpoints on disk." if name == "widen" else "Give only one of them."
            raise ConfigError(name, "must be left out next to a device map", value, remedy)


def _head(path: str, model: PreTrainedModel) -> DraftHead:
    """A draft head, or the model's MTP layers out of its checkpoint.

    Raises:
        ConfigError: it is another model.
    """
    try:
        return hf_specdec.AutoDraftHead.from_pretrained(folder_of(path), target=model, dtype=model.dtype)
    except UnsupportedModelError as error:
        rule = f"must be a draft head, or a checkpoint of {type(model).__name__} with MTP layers"
        raise ConfigError("head", rule, path, "Name a head; --draft-model takes a model.") from error


def _set_attention(model: Any, name: str) -> None:
    try:
        model.set_attn_implementation(name)
    except (ImportError, ValueError) as error:
        remedy = f"{str(error).rstrip('.')}."
        raise ConfigError("attn_implementation", "must be an attention that is here", name, remedy) from error


def _widened(
    original: PreTrainedModel, head: DraftHead | None, folder: str, precision: str, size: tuple[int, int]
) -> tuple[Any, DraftHead | None, dict[str, Any]]:
    """The model and its head at their new size, widened and checked in fp32 and then brought to their precision."""
    model: Any = widen(original, hidden_size=size[0], num_layers=size[1])
    difference = check_widening(original, model)
    facts = {"hidden_size": size[0], "num_layers": size[1], "largest_logit_difference": difference}
    if precision in DTYPES:
        wanted = DTYPES[precision]
        dtype = wanted if isinstance(wanted, torch.dtype) else AutoConfig.from_pretrained(folder).dtype
        hf_specdec.enable(model.to(dtype=dtype))
    else:
        model = _quantised(model, precision)
    drafting = None if head is None else widen_head(head.to(original.device), original, model).to(model.dtype)
    return model, drafting, facts


def _quantised(model: PreTrainedModel, precision: str) -> Any:
    """A model in memory, quantised as a checkpoint is: by loading it."""
    with tempfile.TemporaryDirectory() as folder:
        model.to(dtype=torch.bfloat16).save_pretrained(folder)
        return hf_specdec.AutoModelForCausalLM.from_pretrained(folder, precision=precision)


def check_models(models: Sequence[LoadedModel]) -> None:
    """Raise unless the models can be measured in one run."""
    labels = [loaded.label for loaded in models]
    devices = {str(loaded.device) for loaded in models}
    if not labels:
        raise ConfigError("models", "must hold at least one model", labels, "Load one with load_model.")
    if len(set(labels)) < len(labels):
        raise ConfigError("models", "must have labels of their own", labels, "Give them names of their own.")
    if len(devices) > 1:
        raise ConfigError("models", "must be on one device", sorted(devices), "Measure each device in its own run.")


def pick_device(name: str | torch.device | None) -> torch.device:
    """The device called `name`; without a name the accelerator, or the CPU where there is none."""
    return default_device() if name is None else read_device(name, "device")
