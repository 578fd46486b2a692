"""EAGLE-3 heads on disk: reading both published formats, writing the speculators format."""

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from hf_specdec.common.files import replacing, saving_tensors
from hf_specdec.methods.common.head_files import (
    config_file,
    describing_a_head,
    json_object,
    read_weights,
    take_weights,
)
from hf_specdec.methods.eagle3.head_config import Eagle3HeadConfig
from hf_specdec.methods.eagle3.network import Eagle3Head

# of the target, which the training code keeps beside the head
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
    file = config_file(path, hub)
    with describing_a_head(file):
        config = Eagle3HeadConfig.from_dict(json_object(file))
    weights = _named_as_ours(read_weights(path, hub))
    with describing_a_head(file):
        head = Eagle3Head(config, has_embedding="embed_tokens.weight" in weights)
    take_weights(head, _mapped(head, weights), path)
    head.to(dtype or weights["fc.weight"].dtype)
    head.name_or_path = os.fspath(path)
    return head.eval().requires_grad_(False)


def save_head(head: Eagle3Head, folder: str | os.PathLike[str]) -> None:
    """Write `folder`/config.json and `folder`/model.safetensors in the speculators format.

    Raises:
        OSError: they cannot be written; a file that was there stays as it is.
    """
    target = Path(folder)
    target.mkdir(parents=True, exist_ok=True)
    values = head.config.to_dict()
    values["dtype"] = str(head.dtype).removeprefix("torch.")
    weights = {name: weight.detach().cpu().contiguous() for name, weight in head.state_dict().items()}
    with saving_tensors(target / "model.safetensors"), replacing(target / "model.safetensors") as beside:
        save_file(weights, beside, metadata={"format": "pt"})
    with replacing(target / "config.json") as beside:
        beside.write_text(json.dumps(values, indent=2) + "\n", "utf-8")


def _named_as_ours(weights: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """SafeAILab's `midlayer.` is `layers.0.`; what belongs to the target is left out."""
    named: dict[str, torch.Tensor] = {}
    for name, weight in weights.items():
        name = name.removeprefix("model.")
        if name.startswith("midlayer."):
            name = name.replace("midlayer.", "layers.0.", 1)
        if not name.startswith(TARGETS_OWN):
            named[name] = weight
    return named


def _mapped(head: Eagle3Head, weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The same with the maps of the vocabularies as the head has them."""
    if head.d2t is None:  # files of a full vocabulary may carry maps all the same; they map every id to itself
        return {name: weight for name, weight in weights.items() if name not in ("d2t", "t2d")}
    if "d2t" not in weights:
        return weights
    ids = weights["d2t"].long() + torch.arange(len(weights["d2t"]))
    mask = torch.zeros(head.config.vocab_size, dtype=torch.bool)
    t2d = mask.index_fill(0, ids, True) if int(ids.max()) < len(mask) else weights.get("t2d", mask)
    return {**weights, "d2t": weights["d2t"].long(), "t2d": t2d}
