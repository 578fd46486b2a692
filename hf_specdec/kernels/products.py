"""Matrix products in the code of a module of its own, as of experts and their router: by the core in bf16 and fp16.

A mode of torch sees the products that the module's forward asks for. In the forwards that try a model another sees all
that are left to torch.
"""

import contextlib
from collections.abc import Callable
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from hf_specdec.compat.modules import grouped_mm, own_weights
from hf_specdec.kernels import cpu
from hf_specdec.kernels.linear import can_multiply, core_product
from hf_specdec.kernels.own_forward import OwnForward, here

# Torch's functions that add up products, by their names without underscores before and after.
PRODUCTS = frozenset(
    (
        *("addbmm", "addmm", "addmv", "baddbmm", "bilinear", "bmm", "conv1d", "conv2d", "conv3d", "dot", "einsum"),
        *("grouped_mm", "grouped_mm_fallback", "inner", "linalg_solve_triangular", "linear", "matmul", "mm", "mv"),
        *("rmatmul", "scaled_dot_product_attention", "solve_triangular", "tensordot"),
    )
)


class ProductsForward(OwnForward):
    """The forward of a module with matrices that no other kernel knows, in a model of 16 bits."""

    __slots__ = ()

    @staticmethod
    def can_replace(module: torch.nn.Module) -> bool:
        """Returns whether the module's own code, and not torch's, may multiply by its matrices."""
        is_torchs = type(module).__module__.startswith("torch.") or isinstance(module, torch.nn.Embedding)
        return not is_torchs and any(weight.dim() > 1 and weight.dtype in cpu.KINDS for weight in own_weights(module))

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """As the module's class has it."""
        with _mode if here.depth else contextlib.nullcontext():
            return type(self.module).forward(self.module, *args, **kwargs)


def _linear(tokens: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor | None:
    return core_product(tokens, weight, bias) if can_multiply(tokens, weight, bias) else None


def _grouped(
    tokens: torch.Tensor,
    weights: torch.Tensor,
    offs: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> torch.Tensor | None:
    """Products of consecutive rows with the matrices of `weights`, `(experts, in, out)`; `offs` are the rows' ends."""
    if offs is None or bias is not None or out_dtype is not None or weights.dim() != 3:
        return None
    is_transposed, ends = weights.is_contiguous(), offs.tolist()
    matrices = (weights if is_transposed else weights.transpose(1, 2)).unbind()
    if ends[-1] != len(tokens) or not can_multiply(tokens, matrices[0], is_transposed=is_transposed):
        return None
    out = tokens.new_empty(len(tokens), weights.shape[2])
    for matrix, start, end in zip(matrices, [0, *ends], ends, strict=False):
        if start < end:
            out[start:end] = core_product(tokens[start:end], matrix, is_transposed=is_transposed)
    return out


BY_CORE: dict[Callable[..., Any], Callable[..., torch.Tensor | None]] = {
    torch.nn.functional.linear: _linear,
    grouped_mm: _grouped,
}


class _Products(TorchFunctionMode):
    """Lets the core compute the products that it can."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        by_core = BY_CORE.get(func)
        found = None if by_core is None else by_core(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {})) if found is None else found


_mode = _Products()


class Watch(TorchFunctionMode):
    """Collects the names of torch's functions that add up products in a block."""

    def __init__(self, seen: set[str]) -> None:
        super().__init__()
        self._seen = seen

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        name = getattr(func, "__name__", "").partition(".")[0].strip("_")
        if name in PRODUCTS and not (isinstance(args[0], torch.Tensor) and args[0].shape[-1] == 1):  # nothing is added
            self._seen.add(name)
        return func(*args, **(kwargs or {}))
