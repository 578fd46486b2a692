"""A model to measure, with its tokenizer, and its draft model or head where there is one."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers import AutoConfig, PreTrainedModel, PreTrainedTokenizerBase

import hf_specdec
from hf_specdec.compat import input_device
from hf_specdec.distributed.placement import default_device, read_device
from hf_specdec.errors import ConfigError, unknown_name
from hf_specdec.kernels.quantization.precision import DTYPES, PRECISIONS
from hf_specdec.loading import auto as loading
from hf_specdec.loading.checkpoints.tokenizers import load_foreign_tokenizer, load_tokenizer
from hf_specdec.loading.published import EMBEDDED, folder_of
from hf_specdec.methods.common.draft_head import DraftHead
from hf_specdec.tools.bench.widen import check_widening, widen, widen_head

DRAFTS = ("embedded-draft", "embedded-head")  # of the embedded target


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


def load_model(
    path: str | None = None,
    *,
    dtype: str | None = None,
    device: str | torch.device | None = None,
    assistant_models: Sequence[str] = (),
    widen_to: tuple[int, int] | None = None,
    attn_implementation: str | None = None,
) -> LoadedModel:
    """Load a model for measuring.

    Args:
        path (`str`, *optional*): folder or hub name; `None` is the embedded target with its draft model and head.
        dtype (`str`, *optional*): a precision as `from_pretrained` takes it; by default `"fp32"` for the embedded
            target and `"auto"` otherwise.
        device (`str`, *optional*): where it runs; by default the accelerator, or the CPU where there is none.
        assistant_models (`Sequence[str]`, *optional*): folders or hub names of a draft model, a head, or one of each.
        widen_to (`tuple[int, int]`, *optional*): hidden size and number of layers that the model and its head are
            widened to, the model's function unchanged.
        attn_implementation (`str`, *optional*): the model's attention; transformers' choice by default.

    Raises:
        CheckpointError: a folder is missing or incomplete.
        ConfigError: an unknown precision or device, or a size that cannot be.
        UnsupportedModelError: the model or the head cannot be widened.
    """
    name = path or EMBEDDED
    precision = dtype or ("fp32" if name == EMBEDDED else "auto")
    if precision not in PRECISIONS:
        raise unknown_name("dtype", precision, PRECISIONS)
    where = default_device() if device is None else read_device(device, "device")
    folder = folder_of(name)
    if name == EMBEDDED and not assistant_models:
        assistant_models = DRAFTS
    loaded_as = "fp32" if widen_to else precision
    attention: dict[str, Any] = {} if attn_implementation is None else {"attn_implementation": attn_implementation}
    model: Any = hf_specdec.AutoModelForCausalLM.from_pretrained(folder, precision=loaded_as, **attention)
    model.to(where).eval()
    tokenizer = load_tokenizer(folder)
    draft_model = draft_tokenizer = head = None
    for assistant in assistant_models:
        draft = loading.load_draft(folder_of(assistant), precision=loaded_as, target=model)
        if isinstance(draft, DraftHead):
            head = draft.to(where)
        else:
            draft_model = draft.to(where).eval()
            draft_tokenizer = load_foreign_tokenizer(folder_of(assistant), tokenizer)
    if widen_to is not None:
        name += f", {widen_to[0]}x{widen_to[1]}"
        model, head = _widened(model, head, _dtype_of(precision, folder), widen_to)
        draft_model = None if draft_model is None else draft_model.to(model.dtype)
    hf_specdec.enable(model, plain_kernels=False)  # plain `generate` computes as transformers has it
    return LoadedModel(model, tokenizer, name, draft_model, draft_tokenizer, head)


def _dtype_of(precision: str, folder: str) -> torch.dtype:
    """The dtype of a widened model."""
    dtype = DTYPES.get(precision)
    if dtype is None:  # quantised while a checkpoint is read
        raise ConfigError("dtype", "must be fp32, bf16 or fp16 with a widened model", precision, "Leave --widen out.")
    return dtype if isinstance(dtype, torch.dtype) else AutoConfig.from_pretrained(folder).dtype


def _widened(
    original: PreTrainedModel, head: DraftHead | None, dtype: torch.dtype, size: tuple[int, int]
) -> tuple[Any, DraftHead | None]:
    """The model and its head at their new size, widened and checked in fp32 and then brought to their dtype."""
    model: Any = widen(original, hidden_size=size[0], num_layers=size[1])
    check_widening(original, model)
    large_head = None if head is None else widen_head(head.float(), original, model).to(dtype)
    model = model.to(dtype)
    if model.device.type == "cuda":
        torch.cuda.empty_cache()  # of fp32
    return model, large_head
