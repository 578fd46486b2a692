"""EAGLE-3 heads on disk, in the form of speculators."""

import os

import torch

from hf_specdec.methods.common.head_files import write_head
from hf_specdec.methods.eagle3.network import Eagle3Head

load_head = Eagle3Head.read


def save_head(head: Eagle3Head, folder: str | os.PathLike[str]) -> None:
    """Write `folder`/config.json and `folder`/model.safetensors in the speculators format.

    Raises:
        OSError: they cannot be written; a file that was there stays as it is.
    """
    weights = dict(head.state_dict())
    if head.d2t is not None:  # the same for who reads it by the target's ids
        is_drafted = torch.zeros(head.config.vocab_size, dtype=torch.bool)
        weights["t2d"] = is_drafted.index_fill(0, head.target_ids.cpu(), True)
    write_head(folder, head, head.config.to_dict(), weights)
