"""Puts a model's weights into memory pages of 2 MB, at the addresses that they have.

A step reads all weights once. In pages of 4 KB the processor looks up an address for each 4 KB of them, which on
virtual machines takes as long as the reading itself. Weights that transformers maps from a file are copied out of it
into memory of their own, once; a tensor and its views stay where they are.
"""

from collections.abc import Iterator, Sequence
from pathlib import Path

import torch

from hf_specdec.kernels import cpu

HUGE_PAGE = 1 << 21  # bytes
LEAST_BYTES = 1 << 16  # of a weight
SPARE = 1.25  # memory that must be free, over what the copies take
MAPS, FREE = Path("/proc/self/maps"), Path("/proc/meminfo")


def use_huge_pages(weights: Sequence[torch.Tensor]) -> int:
    """Bytes of weights, and of what lies between them, that are in pages of 2 MB now; 0 where the system has none."""
    if cpu.core is None or not MAPS.exists():
        return 0
    ranges = [(weight.data_ptr(), weight.data_ptr() + weight.nbytes) for weight in weights if _is_large(weight)]
    regions = list(_regions(sorted(ranges)))
    if sum(end - start for start, end, is_file in regions if is_file) * SPARE > _free_bytes():
        return 0
    return sum(cpu.core.huge_pages(start, end, is_file) for start, end, is_file in regions)


def _is_large(weight: torch.Tensor) -> bool:
    is_plain = weight.is_cpu and weight.layout == torch.strided and not weight.untyped_storage().is_shared()
    return is_plain and weight.nbytes >= LEAST_BYTES


def _regions(ranges: list[tuple[int, int]]) -> Iterator[tuple[int, int, bool]]:
    """Whole huge pages around the ranges in each private, writable mapping, and whether it maps a file."""
    for line in MAPS.read_text().splitlines():
        addresses, rights, _, _, inode, *_ = line.split()
        start, end = (int(address, 16) for address in addresses.split("-"))
        inside = [(first, last) for first, last in ranges if start <= first and last <= end]
        if not inside or rights != "rw-p":
            continue
        first = max(start, inside[0][0] // HUGE_PAGE * HUGE_PAGE)
        last = min(end, -(-max(last for _, last in inside) // HUGE_PAGE) * HUGE_PAGE)
        first, last = -(-first // HUGE_PAGE) * HUGE_PAGE, last // HUGE_PAGE * HUGE_PAGE
        if first < last:
            yield first, last, inode != "0"


def _free_bytes() -> int:
    """Memory that the system can give without swapping."""
    for line in FREE.read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) << 10
    return 0
