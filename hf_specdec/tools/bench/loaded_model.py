"""The one loader of all commands: a model, with its tokenizer, and its draft model or head where there is one."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import transformers
from transformers import AutoConfig, PreTrainedModel, PreTrainedTokenizerBase

import hf_specdec
from hf_specdec.compat.devices import input_device
from hf_specdec.distributed.placement import default_device, read_device
from hf_specdec.errors import ConfigError, unknown_name
from hf_specdec.kernels.quantization.precision import DTYPES, PRECISIONS
from hf_specdec.loading.auto import SAME_PRECISION
from hf_specdec.loading.checkpoints.tokenizers import load_foreign_tokenizer, load_tokenizer
from hf_specdec.loading.drafts import load_draft
from hf_specdec.loading.published import EMBEDDED, folder_of
from hf_specdec.methods.common.draft_head import DraftHead
from hf_specdec.tools.bench.widen import check_widening, widen, widen_head

AT_HAND = {EMBEDDED: ("embedded-draft", "embedded-head"), "smollm2": ("smollm2-head",)}  # drafts, by their target


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model that is enabled, in evaluation mode and on its device.

    Attributes:
        model (`PreTrainedModel`): the target.
        tokenizer (`PreTrainedTokenizerBase`): the target's.
        name (`str`): the model's name in records and tables, with the size that it was widened to.
        draft_model (`PreTrainedModel`, *optional*): for `draft_model` and transformers' assisted generation.
        draft_tokenizer (`PreTrainedTokenizerBase`, *optional*): the draft model's, where it is not the target's.
        head (`DraftHead`, *optional*): for the methods that draft with a head.
    """

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    name: str
    draft_model: PreTrainedModel | None = None
    draft_tokenizer: PreTrainedTokenizerBase | None = None
    head: DraftHead | None = None

    @property
    def device(self) -> torch.device:
        """Device of the inputs."""
        return input_device(self.model)

    def assistant_kwargs(self, kind: str) -> dict[str, Any]:
        """Make the arguments of `generate` that bring the `"draft_model"` or the `"head"`; none where there is none."""
        draft = getattr(self, kind)
        kwargs = {} if draft is None else {"assistant_model": draft}
        if kind == "draft_model" and self.draft_tokenizer is not None:
            kwargs |= {"tokenizer": self.tokenizer, "assistant_tokenizer": self.draft_tokenizer}
        return kwargs


def load_model(
    path: str | None = None,
    *,
    dtype: str | None = None,
    device: str | torch.device | None = None,
    assistant_models: Sequence[str] | None = None,
    assistant_dtype: str | None = None,
    assistant_kwargs: Mapping[str, Any] | None = None,
    widen_to: tuple[int, int] | None = None,
    plain_kernels: bool | None = False,
    **kwargs: Any,
) -> LoadedModel:
    """Load a model and its drafts, by default as `bench` measures them.

    Args:
        path (`str`, *optional*): folder, hub name, GGUF file, or the name of a published or embedded model; `None` is
            the embedded target.
        dtype (`str`, *optional*): a precision as `from_pretrained` takes it; by default `"fp32"` for the embedded
            target and `"auto"` otherwise.
        device (`str`, *optional*): where it runs, unless `kwargs` place it; by default the accelerator, or the CPU
            where there is none.
        assistant_models (`Sequence[str]`, *optional*): folders or hub names of a draft model, a head, or one of each;
            by default those that ship for this model.
        assistant_dtype (`str`, *optional*): precision of the drafts; by default the model's.
        assistant_kwargs (`Mapping`, *optional*): of `from_pretrained` of a draft model, which goes to the model's
            device by default.
        widen_to (`tuple[int, int]`, *optional*): hidden size and number of layers that the model and its head are
            widened to, the model's function unchanged.
        plain_kernels (`bool`, *optional*, defaults to `False`): see `enable`; `False` is transformers' own speed.
        kwargs (`dict`): of `from_pretrained`, such as `attn_implementation`, `device_map` or `tp_plan`.

    Raises:
        CheckpointError: a folder is missing or incomplete.
        ConfigError: an unknown precision or device, a size that cannot be, or a speech model.
        UnsupportedModelError: the model or the head cannot be widened.
    """
    name = path or EMBEDDED
    precision = _precision("dtype", dtype or ("fp32" if name == EMBEDDED else "auto"))
    draft_precision = _precision("assistant_dtype", assistant_dtype or precision)
    folder = folder_of(name)
    final_dtype = None if widen_to is None else _dtype_of(precision, folder)
    if widen_to is not None:
        precision = draft_precision = "fp32"
    if kwargs.get("device_map") is None and kwargs.get("tp_plan") is None:
        kwargs |= _on(default_device() if device is None else read_device(device, "device"))
    model: Any = hf_specdec.AutoModelForCausalLM.from_pretrained(folder, precision=precision, **kwargs)
    _check_writes_text(model, name)
    if not model.name_or_path:  # of a GGUF file, whose weights stay packed
        model.name_or_path = model.config.name_or_path = folder
    tokenizer = load_tokenizer(folder)
    names = AT_HAND.get(name, ()) if assistant_models is None else assistant_models
    places = assistant_kwargs or _on(input_device(model))
    drafts = _load_drafts(names, model, tokenizer, precision=draft_precision, **places)
    if widen_to is not None and final_dtype is not None:
        name += f", {widen_to[0]}x{widen_to[1]}"
        model, drafts = _widened(model, drafts, final_dtype, widen_to)
    hf_specdec.enable(model, plain_kernels=plain_kernels)
    return LoadedModel(model, tokenizer, name, **drafts)


def _load_drafts(
    names: Sequence[str], target: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, **kwargs: Any
) -> dict[str, Any]:
    """Fields of `LoadedModel` of draft models and heads; `kwargs` are those of `load_draft`."""
    drafts: dict[str, Any] = {}
    for name in names:
        draft = load_draft(folder_of(name), target=target, **kwargs)
        if isinstance(draft, DraftHead):
            drafts["head"] = draft.to(input_device(target))
        else:
            foreign = load_foreign_tokenizer(folder_of(name), tokenizer)
            drafts |= {"draft_model": draft, "draft_tokenizer": foreign}
    return drafts


def _precision(field: str, name: str) -> str:
    """The precision of a name, torch's names among them."""
    precision = SAME_PRECISION.get(name, name)
    if precision not in PRECISIONS:
        raise unknown_name(field, name, [*PRECISIONS, *SAME_PRECISION])
    return precision


def _on(device: torch.device) -> dict[str, Any]:
    """Arguments of `from_pretrained` that put a whole model on a device."""
    return {} if device.type == "cpu" else {"device_map": {"": str(device)}}


def _check_writes_text(model: PreTrainedModel, name: str) -> None:
    """Refuse a speech model, whose decoder alone writes text that has nothing to do with the prompt."""
    if type(model.config) in transformers.MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING:
        rule = "must be a model that continues text, not one that transcribes speech"
        remedy = "In Python enable(model) of AutoModelForSpeechSeq2Seq takes a spec_method."
        raise ConfigError("model", rule, f"{name} ({model.config.model_type})", remedy)


def _dtype_of(precision: str, folder: str) -> torch.dtype:
    """The dtype of a widened model."""
    dtype = DTYPES.get(precision)
    if dtype is None:  # quantised while a checkpoint is read
        raise ConfigError("dtype", "must be fp32, bf16 or fp16 with a widened model", precision, "Leave --widen out.")
    return dtype if isinstance(dtype, torch.dtype) else AutoConfig.from_pretrained(folder).dtype


def _widened(
    original: PreTrainedModel, drafts: Mapping[str, Any], dtype: torch.dtype, size: tuple[int, int]
) -> tuple[Any, dict[str, Any]]:
    """The model and its head at their new size, widened and checked in fp32; all of them in their dtype."""
    model: Any = widen(original, hidden_size=size[0], num_layers=size[1])
    check_widening(original, model)
    large = dict(drafts)
    if "head" in large:
        large["head"] = widen_head(large["head"].float(), original, model).to(dtype)
    if "draft_model" in large:
        large["draft_model"].to(dtype)
    model = model.to(dtype)
    if model.device.type == "cuda":
        torch.cuda.empty_cache()  # of fp32
    return model, large
