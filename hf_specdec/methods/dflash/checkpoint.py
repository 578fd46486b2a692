"""DFlash heads on disk, in both published formats."""

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from transformers import PreTrainedModel

from hf_specdec.common.files import replacing, saving_tensors
from hf_specdec.errors import CheckpointError
from hf_specdec.methods.common.head_files import (
    config_file,
    describing_a_head,
    json_object,
    optional_file,
    read_tensors,
    read_weights,
    take_weights,
)
from hf_specdec.methods.dflash.head_config import DFlashHeadConfig, is_head_config
from hf_specdec.methods.dflash.network import DFlashHead

MASK_EMBEDDING = "mask_embedding.pt"
# of the target, which the training code keeps beside the head; `d2t` says what `t2d` does
TARGETS_OWN = ("verifier_lm_head.weight", "verifier_norm.weight", "t2d")
CONFIDENCE = ("confidence_head.proj.weight", "confidence_head.proj.bias")  # acceptance is learned from what is accepted


def load_head(path: str | os.PathLike[str], *, dtype: torch.dtype | None = None, **hub: Any) -> DFlashHead:
    """Read a head from a folder or from the Hugging Face hub.

    Args:
        path: a folder, or a name on the hub.
        dtype: of the weights; by default that of the file.
        hub: `revision`, `token`, `cache_dir`, `local_files_only`, ... as in transformers.

    Raises:
        CheckpointError: something is missing or damaged.
        ConfigError: config.json describes no DFlash head.
    """
    file = config_file(path, hub)
    with describing_a_head(file):
        values = json_object(file)
        config = DFlashHeadConfig.from_dict(values)
    weights = {name.removeprefix("model."): weight for name, weight in read_weights(path, hub).items()}
    if (found := optional_file(path, MASK_EMBEDDING, hub)) is not None:
        kept: Any = read_tensors(found)
        weights["mask_embedding"] = (kept["embedding"] if isinstance(kept, dict) else kept).reshape(-1)
    with describing_a_head(file):
        head = _head(config, weights, path)
    head.to(dtype or weights["fc.weight"].dtype)
    head.name_or_path, head.published = os.fspath(path), values
    return head.eval().requires_grad_(False)


def save_head(head: DFlashHead, folder: str | os.PathLike[str], *, num_target_layers: int) -> None:
    """Write `folder`/config.json, `folder`/model.safetensors and the mask's embedding.

    A head that was read from files is written in their form, a new one in that of the authors.

    Args:
        num_target_layers: of the target.

    Raises:
        OSError: they cannot be written; a file that was there stays as it is.
    """
    target = Path(folder)
    target.mkdir(parents=True, exist_ok=True)
    values = head.config.to_dict() if head.published is None else _without_confidence(head.published)
    values = {"num_target_layers": num_target_layers, **values}
    values["dtype"] = str(head.dtype).removeprefix("torch.")
    weights = {name: weight.detach().cpu().contiguous() for name, weight in head.state_dict().items()}
    mask = weights.pop("mask_embedding", None)
    if head.target_ids is not None:  # the same for who reads it by the target's ids
        drafted = torch.zeros(head.config.layer.vocab_size, dtype=torch.bool)
        weights["t2d"] = drafted.index_fill(0, head.target_ids.cpu(), True)
    with saving_tensors(target / "model.safetensors"), replacing(target / "model.safetensors") as beside:
        save_file(weights, beside, metadata={"format": "pt"})
    if mask is not None:
        with saving_tensors(target / MASK_EMBEDDING), replacing(target / MASK_EMBEDDING) as beside:
            torch.save({"mask_token_id": head.mask_token_id, "embedding": mask}, beside)
    with replacing(target / "config.json") as beside:
        beside.write_text(json.dumps(values, indent=2) + "\n", "utf-8")


def head_of_model(model: PreTrainedModel) -> DFlashHead | None:
    """The head that the authors' own class has loaded, on copies of its weights; `None` for any other model."""
    values = {**model.config.to_dict(), "architectures": [type(model).__name__]}
    if not is_head_config(values):
        return None
    config = DFlashHeadConfig.from_dict(values)
    head = _head(config, model.state_dict(), model.name_or_path).to(model.device, model.dtype)
    head.name_or_path, head.published = model.name_or_path, values
    return head.eval().requires_grad_(False)


def _without_confidence(values: Mapping[str, Any]) -> dict[str, Any]:
    """A config.json without the head that says how sure a DSpark head is, whose weights are not read."""
    kept: dict[str, Any] = {
        name: False if name == "enable_confidence_head" else value for name, value in values.items()
    }
    nested = kept.get("dflash_config")
    return kept if not nested else {**kept, "dflash_config": _without_confidence(nested)}


def _head(config: DFlashHeadConfig, weights: dict[str, torch.Tensor], path: str | os.PathLike[str]) -> DFlashHead:
    head = DFlashHead(
        config,
        has_embedding="embed_tokens.weight" in weights,
        has_output_head="lm_head.weight" in weights,
        has_mask_embedding="mask_embedding" in weights,
    )
    unread = {*TARGETS_OWN, *CONFIDENCE} if head.d2t is not None else {*TARGETS_OWN, *CONFIDENCE, "d2t"}
    if head.d2t is not None and head.lm_head is None:
        message = f"The weights of {os.fspath(path)!r} must hold lm_head.weight, as draft_vocab_size"
        raise CheckpointError(f"{message} {config.draft_vocab_size} is not the target's, but do not.")
    take_weights(head, weights, path, unread=unread)
    return head
