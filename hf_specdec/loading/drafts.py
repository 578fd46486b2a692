"""Loading what drafts: draft heads, and draft models."""

import os
from typing import Any

import torch
import transformers

from hf_specdec.common.files import check_path
from hf_specdec.compat.devices import input_device
from hf_specdec.compat.models import generation_model
from hf_specdec.distributed.placement import read_device
from hf_specdec.engine.head_pairing import without_weights_of
from hf_specdec.errors import ConfigError, SpecError
from hf_specdec.kernels.quantization.precision import DTYPES
from hf_specdec.loading.auto import AutoModelForCausalLM
from hf_specdec.methods.common.draft_head import DraftHead
from hf_specdec.methods.common.head_files import HeadFiles
from hf_specdec.methods.registry import head_kind_of, head_kinds, sources


class AutoDraftHead:
    """Loads draft heads: networks that draft from what the target computed, for `assistant_model=`.

    ```python
    head = hf_specdec.AutoDraftHead.from_pretrained("path/to/eagle3-head")
    model.generate(**inputs, spec_method="eagle3", assistant_model=head)
    ```
    """

    def __init__(self) -> None:
        raise TypeError("AutoDraftHead is not instantiated; use AutoDraftHead.from_pretrained(path).")

    @classmethod
    def from_pretrained(
        cls,
        path: str | os.PathLike[str],
        *,
        target: transformers.PreTrainedModel | None = None,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
        **hub: Any,
    ) -> DraftHead:
        """Read an EAGLE-3 head, a DFlash head, or MTP layers.

        EAGLE-3 heads may have the format of speculators or of SafeAILab and SpecForge; DFlash heads that of their
        authors or of speculators.

        Args:
            path (`str`): a folder, or a name on the Hugging Face hub.
            target (`PreTrainedModel`, *optional*): the model that the head is for. Embeddings and an output head of
                the file that equal the target's are left out, and the target's are read. Has to be given where `path`
                is a checkpoint of it whose MTP layers are wanted.
            dtype (`torch.dtype`, *optional*): of the weights; by default that of the file.
            device (`torch.device`, *optional*): where they go; by default the CPU.
            hub: `revision`, `token`, `cache_dir`, `local_files_only` and the like, as in transformers.

        Raises:
            CheckpointError: something is missing or unreadable.
            ConfigError: config.json describes no draft head, or the device is not here.
            UnsupportedModelError: transformers knows no MTP layers of `target`.
        """
        check_path("path", path, "a folder or a name on the hub")
        if device is not None:
            device = read_device(device, "device")
        if dtype is not None and not isinstance(dtype, torch.dtype):
            raise ConfigError("dtype", "must be a torch.dtype", dtype, "Write torch.float32, for example.")
        inner = None if target is None else generation_model(target)
        if inner is not None and not isinstance(inner, transformers.PreTrainedModel):
            raise ConfigError("target", "must be a transformers model", type(inner).__name__, "Load it first.")
        files = HeadFiles(path, hub)
        kind = head_kind_of(values := files.values_or_empty())
        if kind is not None and kind.load is not None:
            head = kind.load(path, dtype=dtype, **hub)
            if inner is not None:
                without_weights_of(inner, head)
            return head.to(device)
        of_target = next((kind.of_target for kind in head_kinds() if kind.of_target is not None), None)
        if inner is not None and values and of_target is not None:
            return of_target(inner, os.fspath(path)).to(device=device or input_device(inner), dtype=dtype)
        raise _no_head(files)


def is_draft_head(path: str | os.PathLike[str]) -> bool:
    """Tell whether a folder or hub name is that of a draft head, as far as its config.json says."""
    return head_kind_of(HeadFiles(path).values_or_empty()) is not None


def _no_head(files: HeadFiles) -> SpecError:
    """Error for a folder that holds no draft head; raises another where its config.json cannot be read."""
    values = files.values()
    named = values.get("architectures") or values.get("speculators_model_type") or values.get("model_type")
    labels = sorted(source.label for source in sources().values() if source.style == "head")
    remedy = f"Choose the folder of a draft head: {', '.join(labels)}."
    return ConfigError("path", "must have a config.json that describes a draft head", named, remedy)


def load_draft(
    path: str | os.PathLike[str],
    *,
    precision: str | None = None,
    target: transformers.PreTrainedModel | None = None,
    **kwargs: Any,
) -> Any:
    """A draft model, or a draft head where the folder or the hub name is that of one; `generate` puts a head next to
    the target.

    Args:
        target (`PreTrainedModel`, *optional*): the model that it drafts for; see `AutoDraftHead.from_pretrained`.
        precision (`str`, *optional*): see `AutoModelForCausalLM.from_pretrained`, as for `kwargs`, which are a draft
            model's alone. A head is not quantised: precisions other than fp32, bf16 and fp16 leave it as its file is.

    Raises:
        CheckpointError: it is missing or damaged.
        ConfigError: `path` is none.
    """
    check_path("path", path, "a folder or a name on the hub")
    if is_draft_head(path):
        dtype = DTYPES.get(precision or "auto")
        dtype = dtype if isinstance(dtype, torch.dtype) else None
        return AutoDraftHead.from_pretrained(path, target=target, dtype=dtype)
    return AutoModelForCausalLM.from_pretrained(path, precision=precision, **kwargs)
