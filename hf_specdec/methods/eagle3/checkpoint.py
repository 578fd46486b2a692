"""EAGLE-3 heads on disk: reading both published formats, writing the speculators format."""

import os
from collections.abc import Mapping
from typing import Any

import torch

from hf_specdec.methods.common.head_files import HeadFiles, write_head
from hf_specdec.methods.eagle3.head_config import Eagle3HeadConfig
from hf_specdec.methods.eagle3.network import Eagle3Head

# of the target, which the training code keeps with the head
TARGETS_OWN = ("verifier_lm_head.", "verifier_norm.", "rotary_emb.")


def load_head(path: str | os.PathLike[str], *, dtype: torch.dtype | None = None, **hub: Any) -> Eagle3Head:
    """Read a head from a folder or from the Hugging Face hub.

    Args:
        path: a folder, or a name on the hub.
        dtype: of the weights; by default that of the file.
        hub: `revision`, `token`, `cache_dir`, `local_files_only`, ... as in transformers.

    Raises:
        CheckpointError: something is missing or damaged.
        ConfigError: config.json describes no EAGLE-3 head.
    """
    files = HeadFiles(path, hub)
    with files.describing_a_head():
        config = Eagle3HeadConfig.from_dict(files.values())
    weights = _named_as_ours(files.weights())
    with files.describing_a_head():
        head = Eagle3Head(config, has_embedding="embed_tokens.weight" in weights)
    files.fill(head, _mapped(head, weights), dtype=dtype)
    return head


def save_head(head: Eagle3Head, folder: str | os.PathLike[str]) -> None:
    """Write `folder`/config.json and `folder`/model.safetensors in the speculators format.

    Raises:
        OSError: they cannot be written; a file that was there stays as it is.
    """
    write_head(folder, head, head.config.to_dict(), head.state_dict())


def _named_as_ours(weights: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Rename SafeAILab's `midlayer.` to `layers.0.`, and leave out what belongs to the target."""
    named: dict[str, torch.Tensor] = {}
    for name, weight in weights.items():
        name = name.removeprefix("model.")
        if name.startswith("midlayer."):
            name = name.replace("midlayer.", "layers.0.", 1)
        if not name.startswith(TARGETS_OWN):
            named[name] = weight
    return named


def _mapped(head: Eagle3Head, weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Give the weights with the maps of the vocabularies as the head has them."""
    if head.d2t is None:  # files of a full vocabulary may carry maps all the same; they map every id to itself
        return {name: weight for name, weight in weights.items() if name not in ("d2t", "t2d")}
    if "d2t" not in weights:
        return weights
    ids = weights["d2t"].long() + torch.arange(len(weights["d2t"]))
    mask = torch.zeros(head.config.vocab_size, dtype=torch.bool)
    t2d = mask.index_fill(0, ids, True) if int(ids.max()) < len(mask) else weights.get("t2d", mask)
    return {**weights, "d2t": weights["d2t"].long(), "t2d": t2d}
