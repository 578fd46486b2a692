"""The optimiser of every training: Muon for the layers' matrices, AdamW for all other weights."""

from typing import Any

import torch
from torch import nn

__all__ = ["MuonWithAdamW"]

WEIGHT_DECAY = 0.01


class MuonWithAdamW(torch.optim.Optimizer):
    """Muon (https://kellerjordan.github.io/posts/muon/) for matrices, AdamW for embeddings, output heads and vectors.

    Muon's steps are scaled to the size of AdamW's (arXiv 2502.16982, section 2.2), so both take one learning rate.

    Args:
        model: its weights that take gradients are trained.
        lr (`float`): learning rate.
        output: the module that gives the logits, if `model` has one of its own.
    """

    def __init__(self, model: nn.Module, lr: float, *, output: nn.Module | None = None) -> None:
        ends = {module for module in model.modules() if isinstance(module, nn.Embedding)} | {output}
        not_hidden = {weight for module in ends if module is not None for weight in module.parameters()}
        matrices: list[nn.Parameter] = []
        others: list[nn.Parameter] = []
        for weight in model.parameters():
            if weight.requires_grad:
                (matrices if weight.ndim == 2 and weight not in not_hidden else others).append(weight)
        self._parts: list[torch.optim.Optimizer] = []
        if matrices:
            self._parts.append(
                torch.optim.Muon(matrices, lr=lr, weight_decay=WEIGHT_DECAY, adjust_lr_fn="match_rms_adamw")
            )
        if others:
            self._parts.append(torch.optim.AdamW(others, lr=lr, betas=(0.9, 0.95), weight_decay=WEIGHT_DECAY))
        super().__init__([group for part in self._parts for group in part.param_groups], {})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """One step of both, at the learning rates of `param_groups`."""
        for part in self._parts:
            part.step()

    def state_dict(self) -> dict[str, Any]:
        """The states of both."""
        return {"parts": [part.state_dict() for part in self._parts]}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take what `state_dict` gave."""
        for part, state in zip(self._parts, state_dict["parts"], strict=True):
            part.load_state_dict(state)
        self.param_groups = [group for part in self._parts for group in part.param_groups]
