"""Products in the code of a module of its own, as of experts and their router: by the core in bf16 and fp16.

A mode of torch sees the products that the module's forward asks for, and functions of single numbers that torch rounds
in two ways. In the forwards that try a model another sees all products that are left to torch.
"""

import contextlib
from collections.abc import Callable
from typing import Any

import torch
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from hf_specdec.common.replaced import this_thread
from hf_specdec.common.transfer import is_host
from hf_specdec.compat.attention import names_read
from hf_specdec.compat.modules import ROUNDED_ACTIVATIONS, grouped_mm, is_view_of_weight, own_weights
from hf_specdec.kernels import cpu
from hf_specdec.kernels.core_attention import CoreAttention
from hf_specdec.kernels.layers import OwnForward, can_multiply, core_product

# Torch's functions that add up products, by their names without underscores before and after.
PRODUCTS = frozenset(
    (
        *("addbmm", "addmm", "addmv", "baddbmm", "bilinear", "bmm", "conv1d", "conv2d", "conv3d", "dot", "einsum"),
        *("grouped_mm", "grouped_mm_fallback", "inner", "linalg_solve_triangular", "linear", "matmul", "mm", "mv"),
        *("rmatmul", "scaled_dot_product_attention", "solve_triangular", "tensordot"),
    )
)

# Functions of single numbers whose code for whole vectors of them rounds otherwise than that for the rest.
BY_VECTORS = (
    *(functional.elu, functional.gelu, functional.silu, functional.softplus),
    *(torch.rsqrt, torch.sigmoid, torch.Tensor.rsqrt, torch.Tensor.sigmoid),
)
VECTORS = 64  # numbers that torch's loops compute at once, at most
SERIAL = 1 << 14  # numbers that torch leaves to one thread


class ProductsForward(OwnForward):
    """The forward of a module whose own code multiplies, in a model of 16 bits."""

    __slots__ = ()

    @staticmethod
    def can_replace(module: torch.nn.Module) -> bool:
        """Returns whether the module's own code, and not torch's, may multiply by its matrices, or attends itself."""
        kind: Any = type(module)
        if kind.__module__.startswith("torch.") or isinstance(module, torch.nn.Embedding):
            return False
        has_weights = any(weight.dim() > 1 and weight.dtype in cpu.KINDS for weight in own_weights(module))
        return has_weights or "scaled_dot_product_attention" in names_read(getattr(kind, "forward", None))

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """As the module's class has it."""
        with _mode if this_thread.depth else contextlib.nullcontext():
            return type(self.module).forward(self.module, *args, **kwargs)


class ActivationForward(OwnForward):
    """The forward of an activation, in a model of 16 bits: torch leaves GELU of numbers without gaps to oneDNN."""

    __slots__ = ()

    @staticmethod
    def can_replace(module: torch.nn.Module) -> bool:
        """Returns whether the module is one of those that torch rounds in two ways."""
        return type(module) in (*ROUNDED_ACTIVATIONS, torch.nn.GELU, torch.nn.SiLU)

    def __call__(self, input: torch.Tensor) -> torch.Tensor:
        """As the module's class has it."""
        function = type(self.module).forward.__get__(self.module)  # equal in all blocks
        return by_vectors(function, input) if this_thread.depth and input.dtype in cpu.HALVES else function(input)


def alike_in(numbers: torch.Tensor) -> contextlib.AbstractContextManager[Any]:
    """A block that rounds products and functions of single numbers alike in any forward, if `numbers` are halves."""
    is_half = this_thread.depth and numbers.dtype in cpu.HALVES and is_host(numbers.device)
    return _mode if is_half else contextlib.nullcontext()


def by_vectors(function: Callable[..., torch.Tensor], numbers: torch.Tensor, **kwargs: Any) -> torch.Tensor:
    """`function(numbers)`, each number computed in a whole vector of them, whatever their count and layout."""
    if (open_recorder := this_thread.recorder) is not None:
        with open_recorder.paused():
            result = in_whole_vectors(function, numbers, **kwargs).clone()  # in memory of its size
        open_recorder.call(in_whole_vectors, (function, numbers), kwargs, result)
        return result
    return in_whole_vectors(function, numbers, **kwargs)


def in_whole_vectors(function: Callable[..., torch.Tensor], numbers: torch.Tensor, **kwargs: Any) -> torch.Tensor:
    """See `by_vectors`."""
    count, is_serial = numbers.numel(), torch.get_num_threads() == 1 or numbers.numel() <= SERIAL
    if not is_host(numbers.device) or (is_serial and count % VECTORS == 0 and numbers.is_contiguous()):
        return function(numbers, **kwargs)
    flat = functional.pad(numbers.reshape(-1), (0, -count % VECTORS))
    if is_serial:
        result = function(flat, **kwargs)
    else:
        result = torch.cat([function(piece, **kwargs) for piece in torch.split(flat, SERIAL)])
    return result[:count].view(numbers.shape)


def _linear(tokens: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor | None:
    return core_product(tokens, weight, bias) if can_multiply(tokens, weight, bias) else None


def _weight_first(weight: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor | None:
    """Product of `(out, in)` with `(..., in, Q)`."""
    if weight.dim() != 2 or tokens.dim() < 2:
        return None
    product = _linear(tokens.transpose(-1, -2), weight)
    return None if product is None else product.transpose(-1, -2)


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
    is_transposed = weights.is_contiguous()
    matrix = weights[0] if is_transposed else weights[0].T
    if not can_multiply(tokens, matrix, is_transposed=is_transposed):
        return None
    if (open_recorder := this_thread.recorder) is None:
        return _by_experts(tokens, weights, offs)
    with open_recorder.paused():
        out = _by_experts(tokens, weights, offs)
    open_recorder.call(_by_experts, (tokens, weights, offs), {}, out)
    return out


def _by_experts(tokens: torch.Tensor, weights: torch.Tensor, offs: torch.Tensor) -> torch.Tensor:
    """See `_grouped`; which rows are an expert's is read anew in each forward."""
    is_transposed, ends = weights.is_contiguous(), offs.tolist()
    matrices = (weights if is_transposed else weights.transpose(1, 2)).unbind()
    if ends[-1] != len(tokens):
        result: torch.Tensor = grouped_mm(tokens, weights, offs=offs)
        return result
    out = tokens.new_empty(len(tokens), weights.shape[2])
    for matrix, start, end in zip(matrices, [0, *ends], ends, strict=False):
        if start < end:
            out[start:end] = core_product(tokens[start:end], matrix, is_transposed=is_transposed)
    return out


def _matmul(*args: torch.Tensor, **kwargs: Any) -> torch.Tensor | None:
    """Products with a weight `(in, out)`, before or after the tokens."""
    if kwargs or len(args) != 2:
        return None
    tokens, matrix = args
    if is_view_of_weight(tokens):
        return _weight_first(*args)
    if not is_view_of_weight(matrix) or matrix.dim() != 2:
        return None
    is_transposed = matrix.is_contiguous()
    weights = matrix if is_transposed else matrix.mT
    fits = can_multiply(tokens, weights, is_transposed=is_transposed)
    return core_product(tokens, weights, is_transposed=is_transposed) if fits else None


def _attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    **_: Any,
) -> torch.Tensor | None:
    attention = CoreAttention(query, key, value, attn_mask, scale, is_causal=is_causal)
    if dropout_p or not attention.fits or query.dtype not in cpu.HALVES:
        return None
    if this_thread.counting is not None:
        this_thread.counting.by_core += 1
    return attention().transpose(1, 2)


def _function(function: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor | None]:
    def compute(numbers: torch.Tensor, *args: Any, inplace: bool = False, **kwargs: Any) -> torch.Tensor | None:
        return None if args or inplace else by_vectors(function, numbers, **kwargs)

    return compute


BY_CORE: dict[Callable[..., Any], Callable[..., torch.Tensor | None]] = {
    functional.linear: _linear,
    functional.scaled_dot_product_attention: _attention,
    grouped_mm: _grouped,
    **dict.fromkeys((torch.bmm, torch.matmul, torch.Tensor.matmul, torch.Tensor.__matmul__), _matmul),
    **{function: _function(function) for function in BY_VECTORS},
}


class _Products(TorchFunctionMode):
    """Lets the core compute the products that it can."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        by_core = BY_CORE.get(func)
        result = None if by_core is None else by_core(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {})) if result is None else result


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
        first = args[0] if name in PRODUCTS else None
        if name in PRODUCTS and not (isinstance(first, torch.Tensor) and (first.shape[-1] == 1 or not first.numel())):
            self._seen.add(name)  # where something is added
        return func(*args, **(kwargs or {}))
