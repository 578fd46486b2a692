"""DFlash heads on disk, in both published formats."""

import os
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from hf_specdec.common.files import replacing, saving_tensors
from hf_specdec.errors import CheckpointError
from hf_specdec.methods.common.head_files import HeadFiles, read_tensors, write_head
from hf_specdec.methods.dflash.head_config import DFlashHeadConfig, is_head_config
from hf_specdec.methods.dflash.network import DFlashHead

MASK_EMBEDDING = "mask_embedding.pt"
# of the target, which the training code keeps with the head; `d2t` says what `t2d` does
TARGETS_OWN = ("verifier_lm_head.weight", "verifier_norm.weight", "t2d")


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
    values = head.config.to_dict() if head.published is None else dict(head.published)
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


def head_of_model(model: object) -> DFlashHead | None:
    """Copy the head that the authors' own class has loaded; `None` for anything else."""
    if not isinstance(model, PreTrainedModel):
        return None
    values = {**model.config.to_dict(), "architectures": [type(model).__name__]}
    if not is_head_config(values):
        return None
    config = DFlashHeadConfig.from_dict(values)
    head = _head(config, model.state_dict(), HeadFiles(model.name_or_path), model.dtype).to(model.device)
    head.published = values
    return head


def _head(
    config: DFlashHeadConfig, weights: dict[str, torch.Tensor], files: HeadFiles, dtype: torch.dtype | None
) -> DFlashHead:
    head = DFlashHead(
        config,
        has_embedding="embed_tokens.weight" in weights,
        has_output_head="lm_head.weight" in weights,
        has_mask_embedding="mask_embedding" in weights,
    )
    unread = {*TARGETS_OWN} if head.d2t is not None else {*TARGETS_OWN, "d2t"}
    if head.d2t is not None and head.lm_head is None:
        message = f"The weights of {os.fspath(files.path)!r} must hold lm_head.weight, as draft_vocab_size"
        raise CheckpointError(f"{message} {config.draft_vocab_size} is not the target's, but do not.")
    files.fill(head, weights, dtype=dtype, unread=unread)
    return head
