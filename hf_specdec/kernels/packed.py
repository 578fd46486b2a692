"""Linear layers and embeddings whose weights stay packed in 8, 6 or 4 bits, computed by the compiled core on a CPU.

A linear layer rounds each token to 8 bits in blocks of 32 numbers, as llama.cpp does, multiplies integers, and adds the
blocks up in fp32 in one order: a token has the same result beside any others. An embedding widens the rows that it
looks up.

The formats are those of GGUF files, interleaved as the core reads them: see kernels/native/packed.h for the layout. A
matrix becomes `(rows, bytes of a row)` in int8, with as many rows more as fill a group of 16:

    packed = quantized(weight)             # in Q8_0
    packed = interleaved(blocks, Q4_K)     # the blocks of a GGUF file
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn.functional import pad

from hf_specdec.common.replaced import this_thread
from hf_specdec.errors import UnsupportedModelError
from hf_specdec.kernels import cpu

GROUP, COLUMNS = 16, 32  # rows of a group, numbers of a block
LARGEST, TINY = 127, 2.0**-24  # code of Q8_0, and scale
AT_ONCE = 1 << 20  # weights packed at once


@dataclass(frozen=True, slots=True)
class Format:
    """A way of packing numbers.

    Attributes:
        name (`str`): that of GGUF files.
        number (`int`): as in packed.h.
        type_id (`int`): GGUF's.
        columns (`int`): numbers of a GGUF block.
        block_bytes (`int`): of a GGUF block.
        group_bytes (`int`): of 32 columns of 16 rows.
    """

    name: str
    number: int
    type_id: int
    columns: int
    block_bytes: int
    group_bytes: int


Q8_0 = Format("Q8_0", 0, 8, 32, 34, 544)
Q4_0 = Format("Q4_0", 1, 2, 32, 18, 288)
Q4_1 = Format("Q4_1", 2, 3, 32, 20, 320)
Q4_K = Format("Q4_K", 3, 12, 256, 144, 296)
Q6_K = Format("Q6_K", 4, 14, 256, 210, 420)
FORMATS = {kind.name: kind for kind in (Q8_0, Q4_0, Q4_1, Q4_K, Q6_K)}


def quantized(weight: torch.Tensor) -> torch.Tensor:
    """Pack a matrix `(rows, columns)` in Q8_0: codes from -127 to 127, 32 of which share a scale in fp16."""
    rows, columns = weight.shape
    packed = empty(rows, columns, Q8_0)
    for start, end in _pieces(rows, columns):
        blocks = pad(weight[start:end].float(), (0, -columns % COLUMNS)).view(end - start, -1, COLUMNS)
        scales = (blocks.abs().amax(-1, keepdim=True) / LARGEST).half()
        codes = (blocks / scales.float().clamp(min=TINY)).round_().clamp_(-LARGEST, LARGEST).to(torch.int8)
        _put(packed, start, rows, codes.view(torch.uint8) ^ 128, [scales[..., None].view(torch.uint8)])
    return packed.view(torch.int8)


def interleaved(blocks: torch.Tensor, kind: Format, order: torch.Tensor | None = None) -> torch.Tensor:
    """Pack a matrix of a GGUF file.

    Args:
        blocks (`torch.Tensor`): the file's bytes, `(rows, bytes of a row)`.
        kind (`Format`): theirs.
        order (`torch.Tensor`, *optional*): for each row, the row of `blocks` that it is.
    """
    rows, columns = len(blocks), blocks.shape[1] // kind.block_bytes * kind.columns
    packed = empty(rows, columns, kind)
    for start, end in _pieces(rows, columns):
        part = blocks[start:end] if order is None else blocks[order[start:end]]
        codes, scales = SPLITS[kind](part.view(end - start, -1, kind.block_bytes))
        _put(packed, start, rows, codes, scales)
    return packed.view(torch.int8)


def empty(rows: int, columns: int, kind: Format, dtype: torch.dtype = torch.uint8, device: Any = None) -> torch.Tensor:
    """A packed matrix without numbers: `(rows that fill whole groups, bytes of a row)`."""
    padded = -(-rows // GROUP) * GROUP
    return torch.empty(padded, -(-columns // COLUMNS) * kind.group_bytes // GROUP, dtype=dtype, device=device)


def _pieces(rows: int, columns: int) -> Iterator[tuple[int, int]]:
    """Starts and ends of rows that are packed at once: whole groups."""
    step = max(AT_ONCE // columns // GROUP, 1) * GROUP
    return ((start, min(start + step, rows)) for start in range(0, rows, step))


def _put(packed: torch.Tensor, start: int, num_rows: int, codes: torch.Tensor, scales: list[torch.Tensor]) -> None:
    """Put rows from `start` on into a packed matrix of `num_rows` rows.

    Args:
        codes: bytes, `(rows, blocks, bytes of a block)`.
        scales: each `(rows, blocks, numbers, bytes of a number)`.
    """
    missing = -len(codes) % GROUP
    lines = pad(codes.reshape(len(codes), -1, 4), (0, 0, 0, 0, 0, missing))  # four bytes of a row in a line
    lines = lines.view(-1, GROUP, *lines.shape[1:]).transpose(1, 2).flatten(1)  # (groups, bytes)
    parts = [pad(part, (0, 0, 0, 0, 0, 0, 0, missing)) for part in scales]
    parts = [part.view(-1, GROUP, *part.shape[1:]) for part in parts]
    numbers = torch.cat([part.movedim(1, 3).flatten(2) for part in parts], dim=2).flatten(1)  # (groups, bytes)
    num_groups, group = -(-num_rows // GROUP), start // GROUP
    code_bytes, scale_bytes = lines.shape[1], numbers.shape[1]
    middle, packed = num_groups * code_bytes, packed.view(-1)
    packed[:middle].view(num_groups, code_bytes)[group : group + len(lines)] = lines
    packed[middle:].view(num_groups, scale_bytes)[group : group + len(lines)] = numbers


def _nibbles(codes: torch.Tensor) -> torch.Tensor:
    """Codes of 4 bits `(..., 32)` as bytes `(..., 16)`: number i in the low half of byte i, i + 16 in the high half."""
    return codes[..., :16] | codes[..., 16:] << 4


def _parted(numbers: torch.Tensor, *sizes: int) -> torch.Tensor:
    """The same with the last dimension in several."""
    return numbers.reshape(*numbers.shape[:-1], *sizes)


def _split_q8_0(blocks: torch.Tensor) -> tuple[torch.Tensor, list[torch.Tensor]]:
    return blocks[..., 2:] ^ 128, [blocks[..., None, :2]]


def _split_q4_0(blocks: torch.Tensor) -> tuple[torch.Tensor, list[torch.Tensor]]:
    return blocks[..., 2:], [blocks[..., None, :2]]


def _split_q4_1(blocks: torch.Tensor) -> tuple[torch.Tensor, list[torch.Tensor]]:
    return blocks[..., 4:], [_parted(blocks[..., :4], 2, 2)]


def _split_q4_k(blocks: torch.Tensor) -> tuple[torch.Tensor, list[torch.Tensor]]:
    first, second, third = blocks[..., 4:8], blocks[..., 8:12], blocks[..., 12:16]
    scales = torch.cat([first & 63, (third & 15) | (first >> 6 << 4)], dim=-1)
    least = torch.cat([second & 63, (third >> 4) | (second >> 6 << 4)], dim=-1)
    pairs = _parted(blocks[..., 16:], 4, 32)
    codes = torch.stack([pairs & 15, pairs >> 4], dim=-2)  # (rows, supers, 4, 2, 32)
    numbers = torch.cat([scales, least], dim=-1)[..., None]
    return _nibbles(codes).flatten(2), [_parted(blocks[..., :4], 2, 2), numbers]


def _split_q6_k(blocks: torch.Tensor) -> tuple[torch.Tensor, list[torch.Tensor]]:
    low = _parted(blocks[..., :128], 2, 2, 32)  # (rows, supers, halves of 128, quarters, 32)
    high = _parted(blocks[..., 128:192], 2, 1, 32)
    low = torch.cat([low & 15, low >> 4], dim=-2)  # (rows, supers, 2, 4, 32)
    high = torch.cat([high >> 2 * place & 3 for place in range(4)], dim=-2)
    fours = _parted(high, 2, 4, 4)  # halves of a block, lines, places
    first, second, third, fourth = (fours[..., line, :] << 2 * line for line in range(4))
    bits = first | second | third | fourth  # (rows, supers, 2, 4, 2, 4)
    codes = torch.cat([_nibbles(low), bits.flatten(-2)], dim=-1)
    return codes.flatten(2), [blocks[..., None, 208:], blocks[..., 192:208, None]]


SPLITS = {Q8_0: _split_q8_0, Q4_0: _split_q4_0, Q4_1: _split_q4_1, Q4_K: _split_q4_k, Q6_K: _split_q6_k}


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
        out = torch.empty((*rows.shape, self.embedding_dim), dtype=self.dtype, device=rows.device)
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
