"""Layers of a few tokens by the compiled core, in threads that are inside a block of it.

Torch multiplies a matrix with one token as fast as memory delivers the matrix. For more tokens it copies an fp32 matrix
into another layout first, and computes with bf16 and fp16 number by number on CPUs that have no instructions for them;
either takes several times as long. The core reads the matrix once for all tokens. GPT-2's `Conv1D` is such a layer with
its matrix transposed. RMSNorm torch computes in eight operations, each of which takes longer to begin than to compute a
few tokens; the core rounds as they do, and only the sum of squares is added up in another order.
"""

import contextlib
import functools
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TypeGuard

import torch
from torch.nn.functional import pad

from hf_specdec.common.replaced import Replacement, replaced, this_thread
from hf_specdec.common.transfer import HOST
from hf_specdec.compat.loading import Conv1D
from hf_specdec.compat.modules import NO_BLOCK, LlamaRMSNorm, is_rms_norm, parameters_of, without_modes
from hf_specdec.kernels import cpu

LANES = 8  # what the core multiplies at once; inputs of a layer are a multiple of it
WIDTH = 16  # outputs are a multiple of it where the matrix is transposed
MOST_TOKENS = 256  # of a product in fp32; torch's products of more are as fast
MOST_NUMBERS = 1 << 18  # of a norm in fp32, which the core computes in one thread
AT_ONCE = 1024  # tokens, of which the core has a copy in fp32
LEAST_WEIGHTS = 1 << 15  # of a layer in fp32; a call takes longer than smaller ones
TRIED = (2, 3, 4, 7, 16, 33, 64, 100, 200, 256)  # tokens of products whose bits are compared
MOST_TRIED = 8192  # outputs of these
PLAIN = (torch.Tensor, torch.nn.Parameter)
FORWARDS = {cls: cls.forward for cls in (torch.nn.Linear, Conv1D)}  # before anybody replaces them


@dataclass(slots=True)
class Attended:
    """Attention of the forwards in a `counted` block.

    Attributes:
        by_core (`int`): calls that the core has computed.
        by_torch (`set[str]`): classes of the modules whose attention torch has computed, and functions of torch that
            have added up other products.
    """

    by_core: int = 0
    by_torch: set[str] = field(default_factory=set)


@contextlib.contextmanager
def counted() -> Iterator[Attended]:
    """A block whose calls of attention, in blocks with the core in this thread, are counted."""
    attended = Attended()
    with replaced(counting=attended):
        yield attended


def unseen() -> contextlib.AbstractContextManager[None]:
    """A block of this package's code, which a mode that lets the core compute need not see; one that counts does."""
    return without_modes() if this_thread.depth and this_thread.counting is None else NO_BLOCK


def is_readable(weight: object) -> TypeGuard[torch.nn.Parameter]:
    """True if the core can read a layer's weight: a plain parameter of a dtype that it knows, and not sparse."""
    return type(weight) is torch.nn.Parameter and weight.layout == torch.strided and weight.dtype in cpu.KINDS


class OwnForward(Replacement):
    """Replacement of a layer's forward of one tensor."""

    __slots__ = ()

    def torchs(self, states: torch.Tensor) -> torch.Tensor:
        """Calls the forward of the module's class."""
        result: torch.Tensor = type(self.module).forward(self.module, states)
        return result


class WeightForward(OwnForward):
    """The same of a layer with a weight that is a plain parameter."""

    __slots__ = ("_parameters", "bias", "dtype", "shape", "weight")

    def __init__(self, module: torch.nn.Module) -> None:
        super().__init__(module)
        self._parameters = parameters_of(module)
        weight, self.bias = self._parameters["weight"], self._parameters.get("bias")
        assert weight is not None
        self.weight, self.dtype, self.shape = weight, weight.dtype, weight.shape

    def fits(self, states: torch.Tensor, size: int) -> bool:
        """True if this thread is in a block, and the core can read the layer, and states of `size` numbers a token."""
        parameters, weight, bias = self._parameters, self.weight, self.bias
        return (
            this_thread.depth > 0
            and type(states) is torch.Tensor
            and states.dtype == self.dtype
            and states.is_cpu
            and states.shape[-1:] == (size,)
            and parameters.get("weight") is weight
            and parameters.get("bias") is bias
            and weight.dtype == self.dtype
            and weight.shape == self.shape
            and weight.is_cpu
            and weight.is_contiguous()
            and (bias is None or (bias.dtype == self.dtype and bias.is_cpu and bias.is_contiguous()))
        )


class LinearForward(WeightForward):
    """The forward of a linear layer that `can_replace` has named."""

    __slots__ = ("is_transposed", "num_in", "num_out")

    def __init__(self, module: torch.nn.Linear | Conv1D) -> None:
        super().__init__(module)
        self.is_transposed = type(module) is Conv1D
        self.num_out, self.num_in = reversed(self.shape) if self.is_transposed else self.shape

    @staticmethod
    def can_replace(module: torch.nn.Module) -> bool:
        """Returns whether the core can compute this layer, by what does not change while a call runs."""
        forward = FORWARDS.get(type(module))
        if forward is None or type(module).forward is not forward or forward.__module__ != type(module).__module__:
            return False
        weight = module.weight
        if not is_readable(weight):
            return False
        is_transposed = type(module) is Conv1D
        num_out, num_in = reversed(weight.shape) if is_transposed else weight.shape
        if weight.dtype != torch.float32 and not is_transposed:
            return True
        is_whole = num_in % LANES == 0 and not (is_transposed and num_out % WIDTH)
        return is_whole and (weight.dtype != torch.float32 or weight.numel() >= LEAST_WEIGHTS)

    def __call__(self, input: torch.Tensor) -> torch.Tensor:
        """As the module's class has it."""
        with unseen():
            num_tokens = input.numel() // self.num_in if self.fits(input, self.num_in) else 0
            threads = cpu.threads_for(num_tokens * self.num_out * self.num_in) if num_tokens else 0
            if threads and (
                num_tokens <= MOST_TOKENS or self.dtype != torch.float32 or this_thread.recorder is not None
            ):
                is_transposed = self.is_transposed
                return core_product(input, self.weight, self.bias, num_threads=threads, is_transposed=is_transposed)
        return self.torchs(input)


class NormForward(WeightForward):
    """The forward of a norm that `can_replace` has named."""

    __slots__ = ("epsilon", "size")

    def __init__(self, module: LlamaRMSNorm) -> None:
        super().__init__(module)
        self.epsilon, (self.size,) = module.variance_epsilon, self.shape

    @staticmethod
    def can_replace(module: torch.nn.Module) -> bool:
        """Returns whether the core can compute this norm, by what does not change while a call runs."""
        if not is_rms_norm(module):
            return False
        weight = module.weight
        is_known = is_readable(weight) and weight.dim() == 1
        return is_known and weight.numel() % LANES == 0 and isinstance(module.variance_epsilon, float)

    def __call__(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """As the module's class has it."""
        count = hidden_states.numel()
        is_large = self.dtype == torch.float32 and count > MOST_NUMBERS and this_thread.recorder is None
        if not count or is_large or not self.fits(hidden_states, self.size):
            return self.torchs(hidden_states)
        tokens = hidden_states.contiguous()
        out = torch.empty_like(tokens)
        cpu.core.rms_norm(
            tokens.data_ptr(),
            self.weight.data_ptr(),
            out.data_ptr(),
            tokens.numel() // self.size,
            self.size,
            self.epsilon,
            cpu.KINDS[self.dtype],
        )
        if (open_recorder := this_thread.recorder) is not None:
            open_recorder.core("norm", (tokens, self.weight, out), {"epsilon": self.epsilon})
        return out


@functools.lru_cache(maxsize=256)
def torch_rounds_alike(num_out: int, num_in: int, dtype: torch.dtype, num_threads: int) -> bool:
    """True if torch's product of a matrix with several tokens rounds each of them the same beside any others.

    With one token alone it may take another kernel. Found by products of numbers of very different sizes.
    """
    draws = torch.Generator(device=HOST).manual_seed(0)
    sizes = torch.randn((TRIED[-1], num_in), generator=draws, device=HOST).mul_(2.5).exp_()
    tokens = torch.randn(sizes.shape, generator=draws, device=HOST).mul_(sizes).to(dtype)
    weight = torch.randn((min(num_out, MOST_TRIED), num_in), generator=draws, device=HOST).to(dtype)
    together = torch.nn.functional.linear(tokens, weight)
    alone = (torch.nn.functional.linear(tokens[-count:], weight) for count in TRIED)
    return all(torch.equal(found, together[-len(found) :]) for found in alone)


def product(tokens: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """`tokens @ weight.T + bias` of a matrix that is no layer's own: by the core where it computes halves.

    Args:
        tokens: `(..., in)`; weight: `(out, in)`.
    """
    is_half = tokens.dtype != torch.float32
    if this_thread.depth and is_half and can_multiply(tokens, weight, bias):
        return core_product(tokens, weight, bias)
    return torch.nn.functional.linear(tokens, weight, bias)


def can_multiply(
    tokens: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None, *, is_transposed: bool = False
) -> bool:
    """Returns whether the core multiplies `tokens` by a matrix `(out, in)`, or `(in, out)`."""
    num_out, num_in = reversed(weight.shape) if is_transposed else weight.shape
    return bool(
        tokens.numel()
        and tokens.dtype in cpu.KINDS
        and tokens.shape[-1] == num_in
        and (num_in % LANES == 0 or (tokens.dtype in cpu.HALVES and not is_transposed))
        and not (is_transposed and num_out % WIDTH)
        and all(one.dtype == tokens.dtype and one.is_contiguous() for one in (weight, bias) if one is not None)
        and all(type(one) in PLAIN and one.is_cpu for one in (tokens, weight, bias) if one is not None)
        and cpu.threads_for(tokens.numel() * num_out)
    )


def core_product(
    tokens: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    num_threads: int | None = None,
    is_transposed: bool = False,
) -> torch.Tensor:
    """Multiply what `can_multiply` has named, each token's sums in one order beside any other tokens: `(..., out)`.

    Inputs that are no multiple of 8, as of Gemma 3n's four streams, get zeros, in a copy of the matrix too.
    """
    if missing := -tokens.shape[-1] % LANES:
        tokens, weight = pad(tokens, (0, missing)), pad(weight, (0, missing))
    num_out, num_in = weight.shape[1 if is_transposed else 0], tokens.shape[-1]
    count = tokens.numel() // num_in
    threads = cpu.threads_for(tokens.numel() * num_out) if num_threads is None else num_threads
    if count > AT_ONCE:
        pieces = torch.split(tokens.reshape(count, num_in), AT_ONCE)
        found = [core_product(one, weight, bias, num_threads=threads, is_transposed=is_transposed) for one in pieces]
        return torch.cat(found).view(*tokens.shape[:-1], num_out)
    tokens = tokens.contiguous()
    out = tokens.new_empty((*tokens.shape[:-1], num_out))
    cpu.core.linear(
        tokens.data_ptr(),
        weight.data_ptr(),
        0 if bias is None else bias.data_ptr(),
        out.data_ptr(),
        count,
        num_out,
        num_in,
        cpu.KINDS[tokens.dtype],
        is_transposed,
        threads,
        0 if threads == 1 else cpu.team(),
    )
    if (open_recorder := this_thread.recorder) is not None:
        open_recorder.core("linear", (tokens, weight, bias, out), {"is_transposed": is_transposed})
    return out
