"""Linear layers of a few tokens by the compiled core, in this package's own forwards on a CPU, where that is faster.

Torch multiplies a matrix with one token as fast as memory delivers the matrix. For more tokens it copies an fp32 matrix
into another layout first, and computes with bf16 and fp16 number by number on CPUs that have no instructions for them;
either takes several times as long. The core reads the matrix once for all tokens. Where torch converts, it computes all
products of several tokens; of others the first ones of each size are computed by both in turns, later ones by the
faster. Sums may be rounded in another order.

    linear = FewTokenLinear(model)
    with linear:           # in this thread, until the block ends
        model(**inputs)
"""

import ctypes
import functools
import threading
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.nn.functional as F

from hf_specdec.compat import computes_halves, is_compiled, is_dispatch_traced, modules_of
from hf_specdec.compiled import core

__all__ = ["FewTokenLinear", "why_unused"]

KINDS = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}  # as in linear.c
LANES = 8  # what the core multiplies at once; inputs are a multiple of it
MOST_TOKENS = 128  # torch's products of more are as fast, where the CPU has instructions for the dtype
LEAST_WEIGHTS = 1 << 15  # of a layer; a call takes longer than smaller ones
SHARED_WORK = 1 << 17  # multiplications from which on threads pay
SAMPLES, SKIPPED = 10, 2  # timed products of each way, and how many of them only warm up
OPENMP = ("libgomp", "libiomp", "libomp")  # libraries that may hold torch's threads


class _Here(threading.local):
    """How many blocks this thread is in."""

    depth = 0


_here = _Here()
_lock = threading.Lock()


def why_unused() -> str | None:
    """Why every linear layer is torch's, with the threads that it has now; `None` where the core computes some."""
    if core is None:
        return "no compiled core is installed"
    if not core.has_linear():
        return "the processor has no AVX2"
    if torch.get_num_threads() > 1 and not _team():
        return "torch's threads are not libgomp's"
    return None


class FewTokenLinear:
    """A block in which the linear layers of a model take the faster way, in the thread that enters it.

    For the block each layer has a `forward` of its own. Layers that have one already, as under accelerate's offloading,
    or whose weights are no plain tensors, keep theirs; so do all where a part of the model is compiled, or where
    gradients, autocast, deterministic algorithms or a dispatch mode are on.

    Args:
        model: whose layers they are.
        is_used: whether they may; compiled forwards keep what they were traced with.
    """

    def __init__(self, model: torch.nn.Module, *, is_used: bool = True) -> None:
        is_used = is_used and why_unused() is None and not is_compiled(model)
        self.layers = list(_layers_of(model)) if is_used else []
        self._installed: list[_Layer] = []  # while this block is open

    @property
    def reads_prompts(self) -> bool:
        """Whether the core is to compute prompts too: torch converts the weights number by number."""
        return bool(self.layers) and _is_emulated(self.layers[0].module.weight.dtype)

    def __enter__(self) -> None:
        if not self.layers or not _is_usual():
            return
        with _lock:
            for layer in self.layers:
                installed = vars(layer.module).setdefault("forward", layer)
                if type(installed) is _Layer:  # this one, or that of another thread
                    installed.users += 1
                    self._installed.append(installed)
        _here.depth += bool(self._installed)

    def __exit__(self, *_: object) -> None:
        if not self._installed:
            return
        _here.depth -= 1
        with _lock:
            for layer in self._installed:
                layer.users -= 1
                if not layer.users and vars(layer.module).get("forward") is layer:
                    del vars(layer.module)["forward"]
            self._installed.clear()


class _Layer:
    """The forward of one linear layer while a block is open in any thread."""

    __slots__ = ("module", "users")

    def __init__(self, module: torch.nn.Linear) -> None:
        self.module, self.users = module, 0

    def __call__(self, input: torch.Tensor) -> torch.Tensor:
        """As `torch.nn.Linear.forward`."""
        weight, bias = self.module.weight, self.module.bias
        num_tokens = input.numel() // weight.shape[1]
        threads = torch.get_num_threads() if num_tokens * weight.numel() >= SHARED_WORK else 1
        is_emulated = _is_emulated(weight.dtype)
        if (
            not _here.depth
            or not num_tokens
            or (num_tokens > MOST_TOKENS and not is_emulated)
            or not _fits(input, weight, bias)
            or not (threads == 1 or _team())
        ):
            return F.linear(input, weight, bias)
        if is_emulated and num_tokens > 1:
            return _product(input, weight, bias, threads)
        # products of about as many tokens and weights share what was measured
        trial = _trial((weight.dtype, (num_tokens - 1).bit_length(), weight.numel().bit_length(), threads))
        if trial.is_over:
            return _product(input, weight, bias, threads) if trial.is_ours else F.linear(input, weight, bias)
        is_ours, start = trial.turn(), time.perf_counter()
        out = _product(input, weight, bias, threads) if is_ours else F.linear(input, weight, bias)
        trial.add(is_ours, (time.perf_counter() - start) / (num_tokens * weight.numel()))
        return out


class _Trial:
    """Which way is faster for products of one size.

    Attributes:
        is_over: whether that is known.
        is_ours: whether the core is faster.
    """

    def __init__(self) -> None:
        self.is_over = self.is_ours = False
        self._seconds: tuple[list[float], list[float]] = ([], [])  # a multiplication's, by torch and by the core

    def turn(self) -> bool:
        """Whether the next product that is timed is the core's."""
        torchs, own = self._seconds
        return len(own) <= len(torchs)

    def add(self, is_ours: bool, seconds: float) -> None:
        """A product took so long for each of its multiplications."""
        self._seconds[is_ours].append(seconds)
        torchs, own = (timed[SKIPPED:] for timed in self._seconds)
        if min(len(torchs), len(own)) >= SAMPLES - SKIPPED and not self.is_over:
            self.is_ours = median(own) < median(torchs)
            self.is_over = True


@functools.cache
def _is_emulated(dtype: torch.dtype) -> bool:
    """Whether this CPU has no instructions for such numbers, so that torch converts each of them in every product."""
    return dtype != torch.float32 and not computes_halves(dtype)


@functools.cache
def _trial(size: tuple[Any, ...]) -> _Trial:
    """One for each size in a process: it is the machine that is tried."""
    return _Trial()


def _layers_of(model: torch.nn.Module) -> Iterator[_Layer]:
    """The layers that may take another way, by what does not change while a call runs."""
    for module in modules_of(model):
        if type(module) is torch.nn.Linear and type(vars(module).get("forward")) in (type(None), _Layer):
            weight = module.weight
            is_plain = type(weight) is torch.nn.Parameter and weight.dtype in KINDS
            if is_plain and weight.numel() >= LEAST_WEIGHTS and weight.shape[1] % LANES == 0:
                yield _Layer(module)


def _product(input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, num_threads: int) -> torch.Tensor:
    """`F.linear` by the core."""
    tokens = input.contiguous()
    num_out, num_in = weight.shape
    out = tokens.new_empty((*input.shape[:-1], num_out))
    core.linear(
        tokens.data_ptr(),
        weight.data_ptr(),
        0 if bias is None else bias.data_ptr(),
        out.data_ptr(),
        tokens.numel() // num_in,
        num_out,
        num_in,
        KINDS[weight.dtype],
        num_threads,
        0 if num_threads == 1 else _team(),
    )
    return out


def _fits(tokens: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> bool:
    """Whether the core can read all of them."""
    return (
        type(tokens) is torch.Tensor
        and tokens.dtype == weight.dtype
        and tokens.device.type == weight.device.type == "cpu"
        and tokens.shape[-1] == weight.shape[1]
        and weight.is_contiguous()
        and (bias is None or (bias.dtype == weight.dtype and bias.is_contiguous()))
    )


def _is_usual() -> bool:
    """Whether nothing is on that changes or watches what torch computes."""
    return not (
        torch.is_grad_enabled()
        or torch.is_autocast_enabled("cpu")
        or torch.are_deterministic_algorithms_enabled()
        or torch.compiler.is_compiling()
        or is_dispatch_traced()
    )


@functools.cache
def _team() -> int:
    """The address of the function that runs work on torch's threads; 0 where there is none that is known."""
    try:
        maps = Path("/proc/self/maps").read_text()
        library = _openmp({line.split()[-1] for line in maps.splitlines()})
        return ctypes.cast(ctypes.CDLL(library).GOMP_parallel, ctypes.c_void_p).value or 0 if library else 0
    except (OSError, AttributeError):
        return 0


def _openmp(mapped: Iterable[str]) -> str | None:
    """Torch's OpenMP library among the files that a process has mapped: the one beside torch, else the only one."""
    found = [path for path in mapped if Path(path).name.startswith(OPENMP)]
    own = [path for path in found if Path(path).is_relative_to(Path(torch.__file__).parent)] or found
    return own[0] if len(own) == 1 else None
