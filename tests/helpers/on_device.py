"""Models, batches and inputs of the matrix on a device that is not the CPU: a GPU's, or the emulated one."""

import copy
from typing import Any

import torch

import hf_specdec
from tests.helpers.support import noisy_copy, plain
from tests.helpers.zoo import FAMILIES
from tests.matrix.test_batches import Batch

__all__ = ["SAMPLING", "STATIC", "TREES", "DeviceBatch", "moved"]

TREES = [name for name, family in FAMILIES.items() if family.tier == "tree"]
STATIC = [name for name in TREES if name != "falcon"]  # transformers' own fails there
# What leads all nodes of a step to their tokens at once
SAMPLING: dict[str, dict[str, Any]] = {
    "top_k": {"temperature": 0.1, "top_k": 20},
    "top_p": {"temperature": 0.1, "top_p": 0.9},
    "min_p": {"temperature": 0.1, "min_p": 0.05},
    "repetition_penalty": {"temperature": 0.1, "repetition_penalty": 0.95},
    "all": {"temperature": 0.1, "top_k": 20, "top_p": 0.9, "min_p": 0.05, "repetition_penalty": 0.95},
    "greedy": {"do_sample": False, "top_k": None, "repetition_penalty": 0.95},
}


def moved(model: Any, device: torch.device) -> Any:
    """An enabled copy of a model on the device."""
    return hf_specdec.enable(hf_specdec.disable(copy.deepcopy(model)).to(device))


class DeviceBatch(Batch):
    """The matrix's batch with the model, its draft and the inputs on the device."""

    def __init__(self, model: Any, device: torch.device) -> None:
        super().__init__(model, noisy_copy(model), "greedy")
        self.ids, self.mask = self.ids.to(device), self.mask.to(device)
        self.options["attention_mask"] = self.mask
        self.model, self.draft = moved(self.model, device), self.draft.to(device)
        self.expected = plain(self.model, self.ids, **self.options, return_dict_in_generate=True)
