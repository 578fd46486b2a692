"""Packed weights: the formats of GGUF files, interleaved as the compiled core reads them.

See kernels/native/packed.h for the layout. A matrix becomes `(rows, bytes of a row)` in int8, with as many rows more as
fill a group of 16:

    packed = quantized(weight)             # in Q8_0
    packed = interleaved(blocks, Q4_K)     # the blocks of a GGUF file
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.functional import pad

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


def quantized(weight: Any) -> torch.Tensor:
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
