"""Matrix products of a few rows by Triton, and their share of a GPU's copy bandwidth next to torch's.

Weights are read once for up to 16 rows. Every sum has one order, whatever the number of rows: rows are filled up to
tiles of 16, and the parts that the inner dimension is split into, by the matrix's shape alone, are added in turn.
Decoding uses torch's products; a GPU's times decide whether these take their place. Import it where Triton is
installed.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import triton
import triton.language as tl

from hf_specdec.tools.bench.gpu_shapes import Shape

ROWS = 16  # of a tile: the fewest that tensor cores multiply
BLOCK_OUT, BLOCK_IN = 64, 128
NUM_PROGRAMS, MOST_PARTS = 512, 16  # that keep a GPU's memory busy; parts of a sum
LEAST_IN = 512  # numbers of a part
MEASURED_ROWS = (1, 16, 64)
COLUMNS = {
    "product": "{name}",
    "matrix": "{num_out} x {num_in}",
    "rows": "{rows}",
    "torch": "{torch_share:.0%}",
    "Triton": "{triton_share:.0%}",
}


@triton.jit  # type: ignore[untyped-decorator]
def _sum_parts(  # type: ignore[no-untyped-def]
    states, weight, other, sums, num_rows, num_out, num_in, part_in,
    rows_of: tl.constexpr, block_out: tl.constexpr, block_in: tl.constexpr,
):  # fmt: skip
    """One tile of one part of a product; of `weight` or, in the second half of the blocks, of `other`."""
    tile, block, part = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    num_blocks = tl.cdiv(num_out, block_out)
    matrix = weight
    if block >= num_blocks:
        matrix = other
    rows = tile * rows_of + tl.arange(0, rows_of)
    columns = (block % num_blocks) * block_out + tl.arange(0, block_out)
    total = tl.zeros((rows_of, block_out), dtype=tl.float32)
    for start in range(part * part_in, (part + 1) * part_in, block_in):
        places = start + tl.arange(0, block_in)
        is_in = places < num_in
        own = tl.load(states + rows[:, None] * num_in + places, mask=(rows < num_rows)[:, None] & is_in, other=0.0)
        where = matrix + columns[None, :].to(tl.int64) * num_in + places[:, None]
        weights = tl.load(where, mask=(columns < num_out)[None, :] & is_in[:, None], other=0.0)
        total = tl.dot(own, weights, total, input_precision="ieee")
    place = (part * num_rows + rows[:, None]) * (num_out * tl.cdiv(tl.num_programs(1), num_blocks))
    place += (block // num_blocks) * num_out + columns
    tl.store(sums + place, total, mask=(rows < num_rows)[:, None] & (columns < num_out))


@triton.jit  # type: ignore[untyped-decorator]
def _add_parts(  # type: ignore[no-untyped-def]
    sums, bias, found, num_rows, num_out, num_parts,
    is_gated: tl.constexpr, has_bias: tl.constexpr, block_out: tl.constexpr,
):  # fmt: skip
    """One block of one row: the parts in turn, then the bias or the gate."""
    row, columns = tl.program_id(0), tl.program_id(1) * block_out + tl.arange(0, block_out)
    is_in, width = columns < num_out, num_out * (2 if is_gated else 1)
    total, other = tl.zeros((block_out,), dtype=tl.float32), tl.zeros((block_out,), dtype=tl.float32)
    for part in range(num_parts):
        place = sums + (part * num_rows + row) * width + columns
        total += tl.load(place, mask=is_in, other=0.0)
        if is_gated:
            other += tl.load(place + num_out, mask=is_in, other=0.0)
    if has_bias:
        total += tl.load(bias + columns, mask=is_in, other=0.0).to(tl.float32)
    if is_gated:
        kind = found.dtype.element_ty  # rounded where a layer of its own would round
        gate = total.to(kind).to(tl.float32)
        total = (gate * tl.sigmoid(gate)).to(kind).to(tl.float32) * other.to(kind).to(tl.float32)
    tl.store(found + row * num_out + columns, total.to(found.dtype.element_ty), mask=is_in)


def linear(states: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """`(rows, in)` times `(out, in)`, both contiguous, as `torch.nn.functional.linear` has it."""
    return _product(states, weight, weight, bias, is_gated=False)


def gated(states: torch.Tensor, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """`silu(states @ gate.T) * (states @ up.T)`, `(rows, out)`."""
    return _product(states, gate, up, None, is_gated=True)


def _product(
    states: torch.Tensor, weight: torch.Tensor, other: torch.Tensor, bias: torch.Tensor | None, *, is_gated: bool
) -> torch.Tensor:
    (num_rows, num_in), num_out = states.shape, weight.shape[0]
    num_matrices = 2 if is_gated else 1
    num_blocks = num_matrices * triton.cdiv(num_out, BLOCK_OUT)
    parts = max(1, min(NUM_PROGRAMS // num_blocks, num_in // LEAST_IN, MOST_PARTS))
    part_in = triton.cdiv(triton.cdiv(num_in, parts), BLOCK_IN) * BLOCK_IN
    parts = triton.cdiv(num_in, part_in)
    sums = torch.empty((parts, num_rows, num_matrices * num_out), dtype=torch.float32, device=states.device)
    found = states.new_empty((num_rows, num_out))
    grid = (triton.cdiv(num_rows, ROWS), num_blocks, parts)
    _sum_parts[grid](
        states, weight, other, sums, num_rows, num_out, num_in, part_in,
        rows_of=ROWS, block_out=BLOCK_OUT, block_in=BLOCK_IN, num_stages=4,
    )  # fmt: skip
    _add_parts[num_rows, triton.cdiv(num_out, 4 * BLOCK_OUT)](
        sums, weight if bias is None else bias, found, num_rows, num_out, parts,
        is_gated=is_gated, has_bias=bias is not None, block_out=4 * BLOCK_OUT,
    )  # fmt: skip
    return found


def measure_products(
    shape: Shape,
    bandwidth: float,
    device: torch.device,
    *,
    rows: Sequence[int] = MEASURED_ROWS,
    milliseconds: Callable[[Callable[[], Any]], float] = triton.testing.do_bench_cudagraph,
) -> Iterator[dict[str, Any]]:
    """Shares of the copy bandwidth at which a layer's matrices are read, with the embedded target's proportions.

    Args:
        bandwidth: bytes a second.
        milliseconds: times a function; by default many runs in a CUDA graph.
    """
    assert shape.size is not None
    hidden = shape.size[0]
    inner = hidden * 43 // 16
    silu, torchs = torch.nn.functional.silu, torch.nn.functional.linear
    matrices = {"attention's output": (hidden, hidden), "down": (hidden, inner), "gate, up": (inner, hidden)}
    for name, (num_out, num_in) in matrices.items():
        count = 2 if name == "gate, up" else 1
        first, *second = (torch.randn(num_out, num_in, device=device, dtype=torch.bfloat16) for _ in range(count))
        for num_rows in rows:
            states = torch.randn(num_rows, num_in, device=device, dtype=torch.bfloat16)

            def ours(states: torch.Tensor = states, first: torch.Tensor = first, second: Any = second) -> Any:
                return gated(states, first, *second) if second else linear(states, first)

            def theirs(states: torch.Tensor = states, first: torch.Tensor = first, second: Any = second) -> Any:
                return silu(torchs(states, first)) * torchs(states, second[0]) if second else torchs(states, first)

            size = count * first.numel() * first.element_size()
            shares = [1000 * size / milliseconds(function) / bandwidth for function in (theirs, ours)]
            row = {"name": name, "num_out": count * num_out, "num_in": num_in, "rows": num_rows}
            yield row | dict(zip(("torch_share", "triton_share"), shares, strict=True))
