"""Linear layers of a few tokens by the compiled core, in this package's own forwards on a CPU, where that is faster.

Torch multiplies a matrix with one token as fast as memory delivers the matrix. For more tokens it copies an fp32 matrix
into another layout first, and computes with bf16 and fp16 number by number on CPUs that have no instructions for them;
either takes several times as long. The core reads the matrix once for all tokens.

    linear = FewTokenLinear(model)
    with linear:           # in this thread, until the block ends
        model(**inputs)
"""

import threading
from collections.abc import Iterator

import torch
import torch.nn.functional as F

from hf_specdec.compat import is_compiled, modules_of
from hf_specdec.kernels import cpu

__all__ = ["FewTokenLinear"]

LANES = 8  # what the core multiplies at once; inputs are a multiple of it
MOST_TOKENS = 128  # torch's products of more are as fast, where the CPU has instructions for the dtype
LEAST_WEIGHTS = 1 << 15  # of a layer; a call takes longer than smaller ones


class _Here(threading.local):
    """How many blocks this thread is in."""

    depth = 0


_here = _Here()
_lock = threading.Lock()


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
        is_used = is_used and cpu.why_unused() is None and not is_compiled(model)
        self.layers = list(_layers_of(model)) if is_used else []
        self._installed: list[_Layer] = []  # while this block is open

    @property
    def reads_prompts(self) -> bool:
        """Whether the core is to compute prompts too: torch converts the weights number by number."""
        return bool(self.layers) and cpu.is_emulated(self.layers[0].module.weight.dtype)

    def __enter__(self) -> None:
        if not self.layers or not cpu.is_usual():
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
        work, is_emulated = num_tokens * weight.numel(), cpu.is_emulated(weight.dtype)
        if (
            not _here.depth
            or not num_tokens
            or (num_tokens > MOST_TOKENS and not is_emulated)
            or not _fits(input, weight, bias)
            or not (threads := cpu.threads_for(work))
        ):
            return F.linear(input, weight, bias)
        if is_emulated and num_tokens > 1:
            return _product(input, weight, bias, threads)
        # products of about as many tokens and weights share what was measured
        trial = cpu.trial(("linear", weight.dtype, (num_tokens - 1).bit_length(), weight.numel().bit_length(), threads))
        return trial(lambda: _product(input, weight, bias, threads), lambda: F.linear(input, weight, bias), work)


def _layers_of(model: torch.nn.Module) -> Iterator[_Layer]:
    """The layers that may take another way, by what does not change while a call runs."""
    for module in modules_of(model):
        if type(module) is torch.nn.Linear and type(vars(module).get("forward")) in (type(None), _Layer):
            weight = module.weight
            is_plain = type(weight) is torch.nn.Parameter and weight.dtype in cpu.KINDS
            if is_plain and weight.numel() >= LEAST_WEIGHTS and weight.shape[1] % LANES == 0:
                yield _Layer(module)


def _product(input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, num_threads: int) -> torch.Tensor:
    """`F.linear` by the core."""
    tokens = input.contiguous()
    num_out, num_in = weight.shape
    out = tokens.new_empty((*input.shape[:-1], num_out))
    cpu.core.linear(
        tokens.data_ptr(),
        weight.data_ptr(),
        0 if bias is None else bias.data_ptr(),
        out.data_ptr(),
        tokens.numel() // num_in,
        num_out,
        num_in,
        cpu.KINDS[weight.dtype],
        num_threads,
        0 if num_threads == 1 else cpu.team(),
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
