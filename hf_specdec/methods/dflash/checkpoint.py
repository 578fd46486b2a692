"""DFlash heads on disk, in both published formats and as models of transformers."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from transformers import CONFIG_MAPPING, AutoModel, PreTrainedModel

from hf_specdec.common.files import replacing, saving_tensors
from hf_specdec.errors import CheckpointError
from hf_specdec.methods.common.draft_head import BlockHead
from hf_specdec.methods.common.head_files import HeadFiles, read_tensors, write_head
from hf_specdec.methods.dflash.head_config import DFlashHeadConfig, is_head_config
from hf_specdec.methods.dflash.network import DFlashHead
from hf_specdec.methods.dflash.transformers_model import DFlashModelHead, is_dflash_config

MASK_EMBEDDING = "mask_embedding.pt"
# of the target, which the training code keeps with the head; `d2t` says what `t2d` does
TARGETS_OWN = ("verifier_lm_head.weight", "verifier_norm.weight", "t2d")
CONFIDENCE = ("confidence_head.proj.weight", "confidence_head.proj.bias")  # acceptance is learned from what is accepted


def describes_a_head(values: Mapping[str, Any]) -> bool:
    """Tell whether a config.json is that of a DFlash head in one of the published formats, or of transformers."""
    return is_head_config(values) or _is_transformers_model(values)


def load_any_head(path: str | os.PathLike[str], *, dtype: torch.dtype | None = None, **hub: Any) -> BlockHead:
    """Read a head in one of the published formats, or a model of transformers; see `load_head`."""
    if _is_transformers_model(HeadFiles(path, hub).values()):
        return DFlashModelHead(AutoModel.from_pretrained(path, dtype=dtype or "auto", **hub).eval())
    return load_head(path, dtype=dtype, **hub)


def load_head(path: str | os.PathLike[str], *, dtype: torch.dtype | None = None, **hub: Any) -> DFlashHead:
    """Read a head in one of the published formats from a folder or from the Hugging Face hub.

    Args:
        path: a folder, or a name on the hub.
        dtype: of the weights; by default that of the file.
        hub: `revision`, `token`, `cache_dir`, `local_files_only`, ... as in transformers.

    Raises:
        CheckpointError: something is missing or damaged.
        ConfigError: config.json describes no DFlash head.
    """
    files = HeadFiles(path, hub)
    values = files.values()
    with files.describing_a_head():
        config = DFlashHeadConfig.from_dict(values)
    weights = {name.removeprefix("model."): weight for name, weight in files.weights().items()}
    if (found := files.find(MASK_EMBEDDING)) is not None:
        kept: Any = read_tensors(found)
        weights["mask_embedding"] = (kept["embedding"] if isinstance(kept, dict) else kept).reshape(-1)
    with files.describing_a_head():
        head = _head(config, weights, files, dtype)
    head.published = values
    return head


def save_head(head: DFlashHead, folder: str | os.PathLike[str], *, num_target_layers: int) -> None:
    """Write `folder`/config.json, `folder`/model.safetensors and the mask's embedding.

    A head that was read from files is written in their form, a new one in that of the authors.

    Args:
        num_target_layers: of the target.

    Raises:
        OSError: they cannot be written; a file that was there stays as it is.
    """
    values = head.config.to_dict() if head.published is None else _without_confidence(head.published)
    weights = dict(head.state_dict())
    mask = weights.pop("mask_embedding", None)
    if head.target_ids is not None:  # the same for who reads it by the target's ids
        drafted = torch.zeros(head.config.layer.vocab_size, dtype=torch.bool)
        weights["t2d"] = drafted.index_fill(0, head.target_ids.cpu(), True)
    if mask is not None:
        Path(folder).mkdir(parents=True, exist_ok=True)
        place = Path(folder) / MASK_EMBEDDING
        with saving_tensors(place), replacing(place) as temporary:
            torch.save({"mask_token_id": head.mask_token_id, "embedding": mask.detach().cpu().contiguous()}, temporary)
    write_head(folder, head, {"num_target_layers": num_target_layers, **values}, weights)


def head_of_model(model: object) -> BlockHead | None:
    """Wrap a DFlash model of transformers, or copy the one that the authors' own class has loaded; else `None`."""
    if not isinstance(model, PreTrainedModel):
        return None
    if is_dflash_config(model.config):
        return DFlashModelHead(model)
    values = {**model.config.to_dict(), "architectures": [type(model).__name__]}
    if not is_head_config(values):
        return None
    config = DFlashHeadConfig.from_dict(values)
    head = _head(config, model.state_dict(), HeadFiles(model.name_or_path), model.dtype).to(model.device)
    head.published = values
    return head


def _is_transformers_model(values: Mapping[str, Any]) -> bool:
    kind = values.get("model_type")
    return isinstance(kind, str) and kind in CONFIG_MAPPING and is_dflash_config(CONFIG_MAPPING[kind])


def _without_confidence(values: Mapping[str, Any]) -> dict[str, Any]:
    """Copy a config.json without the head that says how sure a DSpark head is, whose weights are not read."""
    kept: dict[str, Any] = {
        name: False if name == "enable_confidence_head" else value for name, value in values.items()
    }
    nested = kept.get("dflash_config")
    return kept if not nested else {**kept, "dflash_config": _without_confidence(nested)}


def _head(
    config: DFlashHeadConfig, weights: dict[str, torch.Tensor], files: HeadFiles, dtype: torch.dtype | None
) -> DFlashHead:
    head = DFlashHead(
        config,
        has_embedding="embed_tokens.weight" in weights,
        has_output_head="lm_head.weight" in weights,
        has_mask_embedding="mask_embedding" in weights,
    )
    unread = {*TARGETS_OWN, *CONFIDENCE} if head.d2t is not None else {*TARGETS_OWN, *CONFIDENCE, "d2t"}
    if head.d2t is not None and head.lm_head is None:
        message = f"The weights of {os.fspath(files.path)!r} must hold lm_head.weight, as draft_vocab_size"
        raise CheckpointError(f"{message} {config.draft_vocab_size} is not the target's, but do not.")
    files.fill(head, weights, dtype=dtype, unread=unread)
    return head
