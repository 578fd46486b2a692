"""Common part of the compiled core's kernels: conditions, threads and memory pages.

The core computes in this package's own forwards on a CPU. In bf16 and fp16 it computes every layer that it can: its
sums have one order for any number of tokens, torch's have not, and the order decides how a sum is rounded. In fp32 it
computes those of up to 256 tokens, in a quarter of torch's time for two tokens and in nine tenths for 256.
"""

import ctypes
import functools
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import torch

from hf_specdec.common.replaced import this_thread
from hf_specdec.compat.devices import computes_halves
from hf_specdec.compat.modules import has_own_functions, is_dispatch_traced
from hf_specdec.kernels.native import core as core

KINDS = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}  # as in tiles.h
HALVES = (torch.bfloat16, torch.float16)
SHARED_WORK = 1 << 17  # multiplications from which on threads pay
HUGE_PAGE = 1 << 21  # bytes
LEAST_BYTES = 1 << 16  # of a weight
SPARE = 1.25  # memory that must be free, over what the copies take
MAPS, FREE = Path("/proc/self/maps"), Path("/proc/meminfo")


def why_unused() -> str | None:
    """Reason why torch computes everything, with the threads that it has now; `None` where the core computes some."""
    if core is None:
        return "no compiled core is installed"
    if not core.has_kernels():
        return "the processor has no AVX2"
    if torch.get_num_threads() > 1 and not team():
        return "torch's threads are not libgomp's"
    return None


def is_usual() -> bool:
    """Returns whether nothing is on that changes or watches what torch computes."""
    return not torch.is_grad_enabled() and not is_watched()


def is_watched() -> bool:
    """Returns whether a setting or a mode of torch, besides gradients, keeps the core from computing."""
    return (
        torch.is_autocast_enabled("cpu")
        or torch.are_deterministic_algorithms_enabled()
        or torch.compiler.is_compiling()
        or (is_dispatch_traced() and this_thread.recorder is None)
        or has_own_functions()
    )


@functools.cache
def is_emulated(dtype: torch.dtype) -> bool:
    """Returns whether this CPU has no instructions for such numbers, so that torch converts each of them."""
    return dtype != torch.float32 and not computes_halves(dtype)


def threads_for(work: int) -> int:
    """Number of threads for so many multiplications; 0 where there are several that the core cannot use."""
    threads = torch.get_num_threads() if work >= SHARED_WORK else 1
    return threads if threads == 1 or team() else 0


def team() -> int:
    """The address of the function that runs work on torch's threads; 0 where there is none that is known."""
    return _address_of("GOMP_parallel")


def team_size() -> int:
    """The address of the function that tells a thread how many there are; 0 where there is none that is known."""
    return _address_of("omp_get_num_threads")


@functools.cache
def _address_of(function: str) -> int:
    """Address of a function of torch's OpenMP library; 0 where that is none that is known."""
    try:
        maps = Path("/proc/self/maps").read_text()
        library = _openmp({line.split()[-1] for line in maps.splitlines()})
        if library is None:
            return 0
        found = ctypes.CDLL(library)
        assert found.GOMP_parallel
        return ctypes.cast(getattr(found, function), ctypes.c_void_p).value or 0
    except (OSError, AttributeError):
        return 0


def _openmp(mapped: Iterable[str]) -> str | None:
    """Torch's OpenMP library among the files that a process has mapped: the one next to torch, else the only one."""
    found = [path for path in mapped if Path(path).name.startswith(("libgomp", "libiomp", "libomp"))]
    own = [path for path in found if Path(path).is_relative_to(Path(torch.__file__).parent)] or found
    return own[0] if len(own) == 1 else None


def use_huge_pages(weights: Sequence[torch.Tensor]) -> int:
    """Puts weights into memory pages of 2 MB where they lie; returns the bytes in such pages, 0 where there are none.

    A step reads all weights once. In pages of 4 KB the processor looks up an address for each 4 KB of them, which on
    virtual machines takes as long as the reading itself. Weights that transformers maps from a file are copied out of
    it into memory of their own, once; a tensor and its views stay where they are.
    """
    if core is None or not MAPS.exists():
        return 0
    ranges = [(weight.data_ptr(), weight.data_ptr() + weight.nbytes) for weight in weights if _is_large(weight)]
    regions = list(_regions(sorted(ranges)))
    if sum(end - start for start, end, is_file in regions if is_file) * SPARE > _free_bytes():
        return 0
    return sum(core.huge_pages(start, end, is_file) for start, end, is_file in regions)


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
