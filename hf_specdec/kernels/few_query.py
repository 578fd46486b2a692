"""Attention of a few queries in this package's own forwards: on a CPU by the compiled core.

`"sdpa"` takes it, and on a CPU `"eager"` where the core computes what a model's own function does. Elsewhere on a CPU,
and in the graphs that are compiled here, torch computes `"sdpa"` without copies of grouped heads.

    attention = FewQueryAttention(model)
    with attention:        # in this thread, until the block ends
        model(**inputs)
"""

import functools
import threading
from collections.abc import Callable
from types import FunctionType, SimpleNamespace
from typing import Any

import torch
from transformers import PreTrainedModel

from hf_specdec.common.replaced import replaced, this_thread
from hf_specdec.common.transfer import is_host
from hf_specdec.compat.attention import (
    EAGER,
    attention_function_of,
    attention_implementation,
    files_with_eager_attention,
    register_attention,
    sdpa_attention_forward,
)
from hf_specdec.compat.compiling import is_traced_for_us
from hf_specdec.compat.modules import shows_attentions
from hf_specdec.kernels import cpu
from hf_specdec.kernels.core_attention import CausalAttention, CoreAttention, can_fold, folded
from hf_specdec.kernels.products import Watch

NAME = "sdpa"
# Arguments that change the result and that only transformers' function knows.
FOREIGN = ("position_bias", "cache", "softcap")
# Parameters of a model's own function: that it always has, that the core computes, that the mask has.
USUAL = {"module", "query", "key", "value", "attention_mask", "scaling", "dropout"}
EXTRAS = {"softcap", "position_bias"}
IGNORED = {"sliding_window"}
Result = tuple[torch.Tensor, torch.Tensor | None]


_register_lock = threading.Lock()


def watch() -> Watch | None:
    """A block whose products torch computes are counted too, where attention is."""
    return None if this_thread.counting is None else Watch(this_thread.counting.by_torch)


class FewQueryAttention:
    """A block in which attention takes the faster way, in the thread that enters it.

    Outside, and for what is not known here, the function that is registered for `"sdpa"` is transformers' own, and that
    of a model's file the model's. Off the CPU nothing is wrapped unless the block's forwards are compiled.

    Args:
        model: whose attention it is; `None` for one that is known to be torch's.
        device: where that one computes.
        is_compiled: whether this package compiles the forwards of the block.
    """

    def __init__(
        self,
        model: PreTrainedModel | None = None,
        device: torch.device | str = "cpu",
        *,
        is_compiled: bool = False,
    ) -> None:
        name = NAME if model is None else attention_implementation(model.config)
        self._is_on_host = is_host(torch.device(device if model is None else model.device))
        self._files: list[dict[str, Any]] = []
        self._block: replaced | None = None  # while it is open
        if model is not None and name == "eager" and self._is_on_host and not is_compiled:
            self._files = files_with_eager_attention(model)
        self.is_used = bool(self._files) or (name == NAME and (self._is_on_host or is_compiled))
        if name == NAME and self.is_used:
            _register()

    def __enter__(self) -> None:
        if not self.is_used:
            return
        has_core = this_thread.has_core
        if not this_thread.attends:
            has_core = self._is_on_host and cpu.why_unused() is None and cpu.is_usual()
        self._block = replaced(attends=True, has_core=has_core)
        self._block.__enter__()
        for file in self._files if has_core else ():
            _put_eager(file)

    def __exit__(self, *_: object) -> None:
        if (block := self._block) is not None:
            self._block = None
            block.__exit__()

    @property
    def takes_packed_rows(self) -> bool:
        """Returns whether queries of packed rows find the keys of their own rows."""
        is_torchs = self.is_used and not self._files
        return is_torchs and self._is_on_host and isinstance(attention_function_of(NAME), _Attention)


class _Attention:
    """transformers' attention function, and inside a block the faster ones.

    Attributes:
        original: transformers'.
    """

    original = staticmethod(sdpa_attention_forward)

    def __call__(
        self,
        module: torch.nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        dropout: float = 0.0,
        scaling: float | None = None,
        is_causal: bool | None = None,
        **kwargs: Any,
    ) -> Result:
        def torchs() -> Result:
            if packed is None:
                return padded(query)
            attended, weights = padded(packed.pad(query.transpose(1, 2)).transpose(1, 2))  # (B, heads, W, head_dim)
            return packed.pack(attended), weights

        def padded(query: torch.Tensor) -> Result:
            if is_known and attention_mask is not None and can_fold(module, query, key, value, attention_mask):
                return folded(query, key, value, attention_mask, scaling), None
            attended: Result = self.original(
                module, query, key, value, attention_mask, dropout, scaling, is_causal, **kwargs
            )
            return attended

        bias = kwargs.get("position_bias") if query.dtype in cpu.HALVES else None
        foreign = FOREIGN if bias is None else FOREIGN[1:]
        packed = None if torch.compiler.is_compiling() else this_thread.packed
        is_known = is_traced_for_us() if torch.compiler.is_compiling() else this_thread.attends
        is_known = is_known and not (
            dropout or any(kwargs.get(name) is not None for name in foreign) or kwargs.get("output_attentions")
        )
        if torch.compiler.is_compiling() or not (this_thread.attends and this_thread.has_core):
            return torchs()
        causal = bool(getattr(module, "is_causal", True) if is_causal is None else is_causal)
        by_core: CausalAttention | CoreAttention | None = None
        reads_prompt = attention_mask is None and causal and query.shape[2] > 1 and query.dtype in cpu.HALVES
        if is_known and reads_prompt and bias is None and packed is None:
            by_core = CausalAttention(query, key, value, scaling)
        elif is_known:
            by_core = CoreAttention(
                query, key, value, attention_mask, scaling, is_causal=causal, bias=bias, packed=packed
            )
        return _faster(module, by_core, torchs)


class _EagerAttention:
    """The attention function of a model's file, and inside a block the core's.

    Attributes:
        reads: `what_it_reads` of it.
    """

    def __init__(self, original: Callable[..., Result], reads: frozenset[str]) -> None:
        self.__wrapped__, self.reads = original, reads

    def __call__(
        self,
        module: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        *args: Any,
        **kwargs: Any,
    ) -> Result:
        def models() -> Result:
            return self.__wrapped__(module, query, key, value, attention_mask, *args, **kwargs)

        if torch.compiler.is_compiling() or not (this_thread.attends and this_thread.has_core):
            return models()
        bias, cap = (kwargs.get(name) if name in self.reads else None for name in ("position_bias", "softcap"))
        sinks = module.sinks if "sinks" in self.reads else None
        scaling, by_core = kwargs.get("scaling"), None
        is_known = not (args or scaling is None or (bias is not None and query.dtype not in cpu.HALVES))
        if is_known and not (kwargs.get("dropout") or kwargs.get("output_attentions") or shows_attentions(module)):
            by_core = CoreAttention(
                query, key, value, attention_mask, scaling, is_causal=False, bias=bias, cap=cap, sinks=sinks
            )
        return _faster(module, by_core, models)


def _faster(
    module: torch.nn.Module, by_core: CausalAttention | CoreAttention | None, torchs: Callable[[], Result]
) -> Result:
    """A module's attention by the core where that can compute it; counted."""
    fits = by_core is not None and by_core.fits
    if (counting := this_thread.counting) is not None:
        if fits:
            counting.by_core += 1
        else:
            counting.by_torch.add(type(module).__name__)
    if by_core is None or not fits:
        return torchs()
    if (open_recorder := this_thread.recorder) is not None:
        with open_recorder.paused():
            attended = by_core()
        by_core.note(open_recorder, attended)
        return attended, None
    return by_core(), None


def _put_eager(file: dict[str, Any]) -> None:
    """Put the function with the core's way in the place of a file's own, unless the core computes something else, or
    somebody has put another there.
    """
    with _register_lock:
        function = file[EAGER]
        if getattr(function, "__globals__", None) is file and (reads := what_it_reads(function)) is not None:
            file[EAGER] = _EagerAttention(function, reads)


def _register() -> None:
    """Put the function with the faster ways in the place of transformers' own, unless somebody registered another."""
    with _register_lock:
        if attention_function_of(NAME) is sdpa_attention_forward:
            register_attention(NAME, _Attention())


@functools.cache
def what_it_reads(function: FunctionType) -> frozenset[str] | None:
    """Find what a function `(module, query, key, value, attention_mask, ...)` reads besides usual arguments.

    Of `"softcap"`, `"position_bias"` and the module's `"sinks"`; `None` where its result is not the core's for random
    numbers.
    """
    code = function.__code__
    named = set(code.co_varnames[: code.co_argcount + code.co_kwonlyargcount])
    if not named <= USUAL | EXTRAS | IGNORED:
        return None
    at = torch.Generator().manual_seed(0)
    random = functools.partial(torch.randn, generator=at, dtype=torch.float32, device="cpu")
    query, key, value, added = random(2, 4, 3, 16), random(2, 4, 5, 16), random(2, 4, 5, 16), random(1, 4, 3, 5)
    mask = torch.full_like(added[:, :1], torch.finfo(added.dtype).min).triu(3)
    cap, bias = 1.0 if "softcap" in named else None, added if "position_bias" in named else None
    sinks = random(4) if "sinks" in code.co_names else None
    read = {"softcap": cap, "position_bias": bias, "sinks": sinks}
    module = SimpleNamespace(num_key_value_groups=1, training=False, sinks=sinks)
    kwargs: dict[str, Any] = {name: read[name] for name in EXTRAS & named}
    try:
        attended = function(module, query, key, value, mask, scaling=0.5, dropout=0.0, **kwargs)[0]
    except AttributeError:  # it reads more of a module
        return None
    by_core = CoreAttention(query, key, value, mask, 0.5, is_causal=False, bias=bias, cap=cap, sinks=sinks)
    if not (by_core.fits and torch.allclose(attended, by_core(), atol=1e-4)):
        return None
    return frozenset(name for name, value in read.items() if value is not None)
