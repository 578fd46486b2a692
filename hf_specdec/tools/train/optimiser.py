"""The optimiser of every training: Muon for the layers' matrices, AdamW for all other weights."""

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from hf_specdec.compat import computes_bf16

WEIGHT_DECAY = 0.01
MOMENTUM = 0.95
COEFFICIENTS = (3.4445, -4.7750, 2.0315)  # of the post: after `NUM_ITERATIONS` singular values are near 1
NUM_ITERATIONS, EPS = 5, 1e-7


class Muon(torch.optim.Optimizer):
    """Muon (https://kellerjordan.github.io/posts/muon/), its steps scaled to AdamW's (arXiv 2502.16982, section 2.2).

    `torch.optim.Muon` with `adjust_lr_fn="match_rms_adamw"`, but for CPUs that compute bf16 slowly: there the
    iterations are in fp32.

    Args:
        matrices: weights of two dimensions.
        lr (`float`): learning rate.
        weight_decay (`float`, *optional*, defaults to `0.01`): share of a weight that a step of learning rate 1 takes.
        like_adamw (`bool`, *optional*, defaults to `True`): whether steps are scaled to AdamW's; otherwise as the
            post scales them, which is torch's `adjust_lr_fn="original"`.
    """

    def __init__(
        self,
        matrices: Iterable[nn.Parameter],
        lr: float,
        weight_decay: float = WEIGHT_DECAY,
        *,
        like_adamw: bool = True,
    ) -> None:
        super().__init__(matrices, {"lr": lr, "weight_decay": weight_decay})
        self._like_adamw = like_adamw

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """One step, at the learning rates of `param_groups`."""
        for group in self.param_groups:
            rate, kept = group["lr"], 1.0 - group["lr"] * group["weight_decay"]
            for weight in group["params"]:
                if weight.grad is None:
                    continue
                state = self.state[weight]
                if not state:
                    state["momentum_buffer"] = torch.zeros_like(weight)
                mean = state["momentum_buffer"]
                mean.lerp_(weight.grad, 1.0 - MOMENTUM)
                update = orthogonal(weight.grad.lerp(mean, MOMENTUM), dtype=_dtype_on(weight.device))
                weight.mul_(kept).add_(update, alpha=-rate * self._scale(*weight.shape))

    def _scale(self, rows: int, columns: int) -> float:
        """Length of a step of learning rate 1, for a matrix of this shape."""
        return float(0.2 * max(rows, columns) ** 0.5 if self._like_adamw else max(1.0, rows / columns) ** 0.5)


def orthogonal(matrix: torch.Tensor, *, dtype: torch.dtype) -> torch.Tensor:
    """`(rows, columns)` with the singular vectors of `matrix` and singular values near 1, by Newton-Schulz steps."""
    a, b, c = COEFFICIENTS
    is_tall = matrix.shape[0] > matrix.shape[1]
    found = (matrix.T if is_tall else matrix).to(dtype)
    found = found / found.norm().clamp(min=EPS)
    for _ in range(NUM_ITERATIONS):
        gram = found @ found.T  # (smaller, smaller)
        found = torch.addmm(found, torch.addmm(gram, gram, gram, beta=b, alpha=c), found, beta=a)
    return found.T if is_tall else found


def _dtype_on(device: torch.device) -> torch.dtype:
    return torch.bfloat16 if computes_bf16(device) else torch.float32


class MuonWithAdamW(torch.optim.Optimizer):
    """`Muon` for matrices, AdamW for embeddings, output heads and vectors, at one learning rate.

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
            self._parts.append(Muon(matrices, lr))
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
