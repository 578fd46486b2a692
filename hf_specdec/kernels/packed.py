"""Linear layers and embeddings whose weights stay packed in 8, 6 or 4 bits, computed by the compiled core on a CPU.

A linear layer rounds each token to 8 bits in blocks of 32 numbers, as llama.cpp does, multiplies integers, and adds the
blocks up in fp32 in one order: a token has the same result beside any others. An embedding widens the rows that it
looks up.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from hf_specdec.common.replaced import this_thread
from hf_specdec.errors import UnsupportedModelError
from hf_specdec.kernels import cpu
from hf_specdec.kernels.packed_layout import Format, empty


class Packed(nn.Module):
    """A module with a packed matrix.

    Casting it to another dtype leaves the matrix as it is.

    Args:
        num_rows (`int`): of the matrix.
        num_columns (`int`): of the matrix.
        kind (`Format`): how it is packed.

    Attributes:
        weight (`torch.nn.Parameter`): `(num_rows, bytes of a row)` in int8, with as many rows more as fill the last
            group of 16. The bytes of a group are interleaved: see `packed_layout`.
    """

    def __init__(self, num_rows: int, num_columns: int, kind: Format, device: Any = None) -> None:
        super().__init__()
        self.kind, self.num_rows, self.num_columns = kind, num_rows, num_columns
        weight = empty(num_rows, num_columns, kind, torch.int8, device)
        self.weight = nn.Parameter(weight, requires_grad=False)

    def address(self, other: torch.Tensor) -> int:
        """Place of the weight in memory.

        Args:
            other: what it is used with.

        Raises:
            UnsupportedModelError: the core cannot compute this here.
        """
        weight: torch.Tensor = self._parameters["weight"]  # type: ignore[assignment]
        if weight.device.type != "cpu" or other.device.type != "cpu" or (why := why_unused()) is not None:
            place = f"{weight.device} with inputs on {other.device}" if cpu.core is not None else f"this CPU: {why}"
            raise UnsupportedModelError(
                f"{type(self).__name__} is computed on CPUs with AVX2 by the compiled core, but is on {place}. "
                'Load the model in "bf16", or with `dequantize=True` from a GGUF file.'
            )
        return weight.data_ptr()

    def extra_repr(self) -> str:
        """As those of torch's modules."""
        return f"{self.num_rows}, {self.num_columns}, kind={self.kind.name}"


class PackedLinear(Packed):
    """`nn.Linear` with a packed weight.

    Args:
        dtype (`torch.dtype`): of the bias.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        kind: Format,
        *,
        bias: bool = False,
        dtype: torch.dtype | None = None,
        device: Any = None,
    ) -> None:
        super().__init__(out_features, in_features, kind, device)
        self.in_features, self.out_features = in_features, out_features
        numbers = torch.empty(out_features, dtype=dtype, device=device) if bias else None
        self.register_parameter("bias", None if numbers is None else nn.Parameter(numbers, requires_grad=False))

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """`(..., in_features)` in fp32, bf16 or fp16 to `(..., out_features)`.

        Raises:
            UnsupportedModelError: the input needs gradients, has another dtype or size, or the core cannot compute.
        """
        address, dtype, num_in, num_out = (
            self.address(input),
            cpu.KINDS.get(input.dtype),
            self.in_features,
            self.out_features,
        )
        if dtype is None or input.shape[-1] != num_in or (input.requires_grad and torch.is_grad_enabled()):
            raise UnsupportedModelError(
                f"Packed weights multiply (..., {num_in}) in fp32, bf16 or fp16 without gradients, not "
                f"{tuple(input.shape)} in {input.dtype}, requires_grad={input.requires_grad}."
            )
        tokens, bias = input.contiguous(), self._parameters["bias"]
        numbers = None if bias is None else bias.to(input.dtype)
        out = tokens.new_empty((*input.shape[:-1], num_out))
        threads = cpu.threads_for(tokens.numel() * num_out) or 1
        cpu.core.packed_linear(
            tokens.data_ptr(),
            address,
            0 if numbers is None else numbers.data_ptr(),
            out.data_ptr(),
            tokens.numel() // num_in,
            num_out,
            num_in,
            dtype,
            self.kind.number,
            threads,
            0 if threads == 1 else cpu.team(),
        )
        if (open_recorder := this_thread.recorder) is not None:
            open_recorder.core("packed_linear", (tokens, self.weight, numbers, out), {"format": self.kind.number})
        return out


class PackedEmbedding(Packed):
    """`nn.Embedding` with a packed table.

    Args:
        scale (`float`, *optional*): what a row is multiplied by.

    Attributes:
        dtype (`torch.dtype`): of the rows that it returns; casting the module changes it.
    """

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        kind: Format,
        *,
        dtype: torch.dtype = torch.float32,
        scale: float | None = None,
        device: Any = None,
    ) -> None:
        super().__init__(num_embeddings, embedding_dim, kind, device)
        self.num_embeddings, self.embedding_dim = num_embeddings, embedding_dim
        self.dtype, self.scale = dtype, scale

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> "PackedEmbedding":
        """See what a cast does to a number."""
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        self.dtype = fn(torch.empty((), dtype=self.dtype)).dtype
        return self

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Token ids of any shape to `(..., embedding_dim)`.

        Raises:
            IndexError: an id outside the table.
            UnsupportedModelError: the core cannot compute.
        """
        rows = input.contiguous().long()
        if (open_recorder := this_thread.recorder) is None:
            return self._rows(rows)
        with open_recorder.paused():
            out = self._rows(rows)
        open_recorder.call(self._rows, (rows,), {}, out)
        return out

    def _rows(self, rows: torch.Tensor) -> torch.Tensor:
        """See `forward`; of ids without gaps."""
        address = self.address(rows)
        out = torch.empty((*rows.shape, self.embedding_dim), dtype=self.dtype)
        cpu.core.packed_rows(
            rows.data_ptr(),
            address,
            out.data_ptr(),
            rows.numel(),
            self.num_embeddings,
            self.embedding_dim,
            cpu.KINDS[out.dtype],
            self.kind.number,
        )
        return out if self.scale is None else out * self.scale


def why_unused() -> str | None:
    """Reason why packed weights cannot be multiplied on this CPU."""
    if cpu.core is None:
        return "no compiled core is installed"
    return None if cpu.core.has_kernels() else "the processor has no AVX2"
