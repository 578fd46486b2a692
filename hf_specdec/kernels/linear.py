"""Linear layers of a few tokens by the compiled core, in this package's own forwards on a CPU, where that is faster.

Torch multiplies a matrix with one token as fast as memory delivers the matrix. For more tokens it copies an fp32 matrix
into another layout first, and computes with bf16 and fp16 number by number on CPUs that have no instructions for them;
either takes several times as long. The core reads the matrix once for all tokens. GPT-2's `Conv1D` is such a layer with
its matrix transposed.

    linear = FewTokenLinear(model)
    with linear:           # in this thread, until the block ends
        model(**inputs)
"""

import threading
from collections.abc import Iterator

import torch

from hf_specdec.compat import is_compiled, modules_of
from hf_specdec.compat.weights import Conv1D
from hf_specdec.kernels import cpu

__all__ = ["FewTokenLinear"]

LANES = 8  # what the core multiplies at once; inputs are a multiple of it
WIDTH = 16  # outputs are a multiple of it where the matrix is transposed
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

    __slots__ = ("is_transposed", "module", "users")

    def __init__(self, module: torch.nn.Linear | Conv1D) -> None:
        self.module, self.users = module, 0
        self.is_transposed = type(module) is Conv1D

    def __call__(self, input: torch.Tensor) -> torch.Tensor:
        """As the module's class has it."""
        weight, bias = self.module.weight, self.module.bias
        num_out, num_in = reversed(weight.shape) if self.is_transposed else weight.shape
        num_tokens = input.numel() // num_in
        work, is_emulated = num_tokens * num_out * num_in, cpu.is_emulated(weight.dtype)
        if (
            not _here.depth
            or not num_tokens
            or (num_tokens > MOST_TOKENS and not is_emulated)
            or not _fits(input, weight, bias, num_in)
            or not (threads := cpu.threads_for(work))
        ):
            return self._torchs(input)

        def own() -> torch.Tensor:
            return _product(input, weight, bias, threads, self.is_transposed)

        if is_emulated and (num_tokens > 1 or self.is_transposed):
            return own()
        # products of about as many tokens and weights share what was measured
        buckets = ((num_tokens - 1).bit_length(), weight.numel().bit_length())
        trial = cpu.trial(("linear", self.is_transposed, weight.dtype, *buckets, threads))
        return trial(own, lambda: self._torchs(input), work)

    def _torchs(self, input: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = type(self.module).forward(self.module, input)
        return result


def _layers_of(model: torch.nn.Module) -> Iterator[_Layer]:
    """The layers that may take another way, by what does not change while a call runs."""
    for module in modules_of(model):
        if type(module) in (torch.nn.Linear, Conv1D) and type(vars(module).get("forward")) in (type(None), _Layer):
            weight = module.weight
            if type(weight) is not torch.nn.Parameter or weight.dtype not in cpu.KINDS:
                continue
            layer = _Layer(module)
            num_out, num_in = reversed(weight.shape) if layer.is_transposed else weight.shape
            is_whole = num_in % LANES == 0 and not (layer.is_transposed and num_out % WIDTH)
            if is_whole and weight.numel() >= LEAST_WEIGHTS:
                yield layer


def _product(
    input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, num_threads: int, is_transposed: bool = False
) -> torch.Tensor:
    """The layer's result by the core."""
    tokens = input.contiguous()
    num_out, num_in = reversed(weight.shape) if is_transposed else weight.shape
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
        is_transposed,
        num_threads,
        0 if num_threads == 1 else cpu.team(),
    )
    return out


def _fits(tokens: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, num_in: int) -> bool:
    """Whether the core can read all of them."""
    return (
        type(tokens) is torch.Tensor
        and tokens.dtype == weight.dtype
        and tokens.device.type == weight.device.type == "cpu"
        and tokens.shape[-1] == num_in
        and weight.is_contiguous()
        and (bias is None or (bias.dtype == weight.dtype and bias.is_contiguous()))
    )
