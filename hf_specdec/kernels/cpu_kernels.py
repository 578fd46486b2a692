"""All kernels of the compiled core for one model's forwards of a few tokens.

A block, in the thread that enters it:

    kernels = CpuKernels(model)
    with kernels:
        model(**inputs)
"""

import contextlib
import copy
from collections.abc import Iterator
from typing import Any, cast

import torch
from transformers import PreTrainedModel

from hf_specdec.common.packed_rows import PackedRows
from hf_specdec.common.replaced import replaced, this_thread
from hf_specdec.common.transfer import is_host
from hf_specdec.compat.attention import MASKED, attention_implementation
from hf_specdec.compat.devices import has_tiles
from hf_specdec.compat.models import innermost_decoder, is_compiled
from hf_specdec.compat.modules import modules_of, parameters_of
from hf_specdec.compat.state_layers import has_states_alone
from hf_specdec.kernels import cpu
from hf_specdec.kernels.few_query import FewQueryAttention, watch
from hf_specdec.kernels.layers import LinearForward, NormForward, OwnForward, counted, torch_rounds_alike
from hf_specdec.kernels.packed import Packed
from hf_specdec.kernels.products import ActivationForward, ProductsForward
from hf_specdec.kernels.quantization.layers import FourBitForward, Fp8Forward

KINDS: tuple[Any, ...] = (LinearForward, NormForward, FourBitForward, Fp8Forward)
PIECE = 2  # tokens: torch may multiply one by another kernel


class CpuKernels:
    """A block whose attention and layers the core computes: in fp32 those of a few tokens, in bf16 and fp16 all.

    Args:
        model: whose forwards they are.
        device: where a network computes that is no model of transformers, and whose attention is torch's.
        is_compiled: whether these forwards are compiled: their layers keep what they were traced with.
    """

    def __init__(
        self, model: torch.nn.Module, *, device: torch.device | str | None = None, is_compiled: bool = False
    ) -> None:
        attending = cast(PreTrainedModel, model) if device is None else None  # or a wrapper that looks like one
        self._attention = FewQueryAttention(attending, device=device or "cpu", is_compiled=is_compiled)
        self._layers = FewTokenLayers(model, is_used=not is_compiled)
        self._watching = contextlib.ExitStack()

    @property
    @contextlib.contextmanager
    def of_prompts(self) -> Iterator[None]:
        """The block for forwards of prompts, which leaves to torch what it computes faster."""
        with contextlib.ExitStack() as stack:
            if self._attends_to_prompts:
                stack.enter_context(counted())  # of steps alone is it asked who computes
                stack.enter_context(self._attention)
            if self._attends_to_prompts or self._layers.reads_prompts:
                stack.enter_context(self._layers.of_prompts)
            yield

    @property
    def _attends_to_prompts(self) -> bool:
        """True if the core computes the attention of prompts: in halves, where torch is faster only by tiles."""
        return self._layers.rounds_alike and not has_tiles()

    @property
    def least_piece(self) -> int:
        """As of `FewTokenLayers`, of models whose steps round each token alike."""
        return self._layers.least_piece if self._attends_to_prompts else 0

    @property
    def takes_packed_rows(self) -> bool:
        """Returns whether the attention takes packed rows."""
        return self._attention.takes_packed_rows

    def packing(self, packed: PackedRows | None) -> contextlib.AbstractContextManager[Any]:
        """A block whose queries are `(1, heads, N, head_dim)`, of packed rows, and whose keys are those of all rows."""
        return contextlib.nullcontext() if packed is None else replaced(packed=packed)

    @property
    def rounds_alike(self) -> bool:
        """True if a token of a step is rounded the same beside any others, which one of a prompt need not be."""
        return self._layers.rounds_alike

    def __enter__(self) -> None:
        self._attention.__enter__()
        self._layers.__enter__()
        if (seen := watch()) is not None and self._layers.rounds_alike:
            self._watching.enter_context(seen)

    def __exit__(self, *_: object) -> None:
        self._watching.close()
        self._layers.__exit__()
        self._attention.__exit__()


class FewTokenLayers:
    """A block in which the core computes layers of a model, in the thread that enters it.

    For the block each of them has a `forward` of its own. Layers that have one already, as under accelerate's
    offloading, or whose weights are no plain tensors, keep theirs; so do all where a part of the model is compiled, or
    where gradients, autocast, deterministic algorithms or a dispatch mode are on.

    Args:
        model: whose layers they are.
        is_used: whether they may; compiled forwards keep what they were traced with.

    Attributes:
        forwards (`list[OwnForward]`): of the layers that the core can compute.
        has_packed (`bool`): whether others are packed, and the rest of the model is in bf16 or fp16.
    """

    def __init__(self, model: torch.nn.Module, *, is_used: bool = True) -> None:
        is_used = is_used and cpu.why_unused() is None and not is_compiled(model)
        dtype, device = getattr(model, "dtype", None), getattr(model, "device", None)
        is_half = dtype in cpu.HALVES and device is not None and is_host(device)
        kinds = (*KINDS, ProductsForward, ActivationForward) if is_half else KINDS
        modules = modules_of(model) if is_used else ()
        forwards = (_forward_for(module, kinds) for module in modules)
        self.forwards: list[OwnForward] = [forward for forward in forwards if forward is not None]
        self.has_packed = is_half and any(isinstance(module, Packed) for module in modules)
        self._block: replaced | None = None  # while it is open

    @property
    def reads_prompts(self) -> bool:
        """True if the core is to compute prompts too: not in halves for which the CPU has instructions, as torch's
        products of many tokens are faster there.
        """
        return any(
            isinstance(forward, LinearForward) and (forward.dtype == torch.float32 or cpu.is_emulated(forward.dtype))
            for forward in self.forwards
        )

    @property
    def of_prompts(self) -> "FewTokenLayers":
        """The same block for prompts: without the products that torch computes faster there."""
        block = copy.copy(self)
        block._block = None  # noqa: SLF001 a copy of its own
        if not self.reads_prompts:
            block.forwards = [
                forward for forward in self.forwards if isinstance(forward, NormForward | ActivationForward)
            ]
        return block

    @property
    def least_piece(self) -> int:
        """Least tokens of a prompt's forward that have the bits that they have in the whole prompt's; 0 for none.

        Asked where the core or torch computes all products as layers, the output's of one token left aside.
        """
        if not all(isinstance(forward, LinearForward | NormForward | ActivationForward) for forward in self.forwards):
            return 0
        if self.reads_prompts:
            return 1
        layers = [forward for forward in self.forwards if isinstance(forward, LinearForward)]
        threads = torch.get_num_threads()
        is_alike = all(
            not layer.is_transposed and torch_rounds_alike(layer.num_out, layer.num_in, layer.dtype, threads)
            for layer in layers
        )
        return PIECE if is_alike else 0

    @property
    def rounds_alike(self) -> bool:
        """True if a token of a step is rounded the same beside any others, which one of a prompt need not be."""
        return self.has_packed or any(
            isinstance(forward, LinearForward) and forward.dtype != torch.float32 for forward in self.forwards
        )

    def __enter__(self) -> None:
        if self.forwards and cpu.is_usual():
            self._block = replaced(self.forwards, depth=this_thread.depth + 1)
            self._block.__enter__()

    def __exit__(self, *_: object) -> None:
        if (block := self._block) is not None:
            self._block = None
            block.__exit__()


def _forward_for(module: torch.nn.Module, kinds: tuple[Any, ...]) -> OwnForward | None:
    """Replacement forward of a layer that the core can compute and that has none of its own; else `None`."""
    forward = vars(module).get("forward")
    if forward is not None and not isinstance(forward, OwnForward):
        return None
    return next((kind(module) for kind in kinds if kind.can_replace(module)), None)


def reason_for_width(model: PreTrainedModel) -> str | None:
    """Reason why forwards of several tokens may round otherwise than forwards of one.

    `None` where the core computes every sum over a token's numbers and over the keys that it sees, each in one order.
    What it has no kernel for, such as attention that a model's own code adds up, only a trial forward shows.
    """
    if model.dtype == torch.float32:
        return "in fp32 the faster kernel computes each number of tokens, and sums have other orders"
    if not is_host(model.device):
        return f"on {model.device.type} a kernel is chosen by the number of tokens"
    if (reason := cpu.why_unused()) is not None:
        return f"torch chooses a kernel by the number of tokens: {reason}"
    if is_compiled(model):
        return "a compiled forward has kernels for each number of tokens"
    if (name := attention_implementation(model.config)) not in MASKED and not has_states_alone(model):
        return f'{name!r} attention rounds by the number of tokens; attn_implementation="sdpa" does not'
    replaced = {forward.module for forward in FewTokenLayers(model).forwards}
    prompts_alone = _encoder_modules(model)
    for module in modules_of(model):
        if module in prompts_alone:
            continue
        # Of a convolution a trial forward shows the use.
        is_alike = module in replaced or isinstance(module, torch.nn.Embedding | torch.nn.Conv1d | Packed)
        if not is_alike and _multiplies(module):
            return f"torch computes {type(module).__name__}, and rounds by the number of tokens"
    return None


def _encoder_modules(model: PreTrainedModel) -> set[torch.nn.Module]:
    """Modules that the forward of a prompt alone computes: encoders of text, images and sound."""
    if not hasattr(model, "get_decoder"):
        return set()
    decoder, output = innermost_decoder(model), model.get_output_embeddings()
    kept = {module for part in (decoder, output) if part is not None for module in modules_of(part)}
    return set(modules_of(model)) - kept - {model}


def _multiplies(module: torch.nn.Module) -> bool:
    """Returns whether a module has a matrix of its own; what norms have scales number by number."""
    return any(parameter is not None and parameter.dim() > 1 for parameter in parameters_of(module).values())
