"""`attn_implementation="xformers"`: memory-efficient attention over transformers' tensors, torch's where it has none.

register()                                      # cheap; imports no xformers
check_attention(model)                          # refuses a model that has it and cannot use it

A kernel has one key/value head for each query head. Grouped queries are therefore folded into the query length,
(B, g*M, Hkv, D), so that no key or value is copied.
"""

import importlib.util
import inspect
import logging
from collections.abc import Callable
from typing import Any

import torch
from transformers import PreTrainedModel

from hf_specdec.compat.attention import (
    attention_function_of,
    attention_implementation,
    can_set_attention,
    eager_attention_of,
    mask_function_of,
    register_attention,
    register_mask_function,
)
from hf_specdec.errors import ConfigError, MissingExtraError, UnsupportedModelError
from hf_specdec.kernels.core_attention import additive, fits, prepared

logger = logging.getLogger("hf_specdec")

NAME = "xformers"
DTYPES = (torch.float16, torch.bfloat16, torch.float32)
ALIGNMENT_BYTES = 16  # of a head and of every row of a bias: 8 half or 4 single precision numbers
# Arguments that change the result and that torch's attention refuses or, worse, ignores.
UNKNOWN = ("softcap", "s_aux", "sinks", "indices", "block_indices")
# Arguments that models' own functions name and that are heeded here: the mask carries windows, torch adds biases.
HEEDED = ("position_bias", "sliding_window")
Kernel = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None, float], torch.Tensor]


def xformers_kernel(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, bias: torch.Tensor | None, scale: float
) -> torch.Tensor:
    """Softmax of the scaled and biased scores, times the values: `(B, M, H, Dv)`; xformers picks the operator.

    Args:
        query: `(B, M, H, D)`; key, value: `(B, K, H, D)` and `(B, K, H, Dv)`; strides as they come.
        bias: `(B, H, M, K)` in the query's dtype, every stride but the last a multiple of 16 bytes.

    Raises:
        NotImplementedError: no kernel takes these.
    """
    output: torch.Tensor = _operators().memory_efficient_attention_forward(
        query, key, value, attn_bias=bias, scale=scale
    )
    return output


class KernelAttention:
    """The attention function of a kernel; it says each reason for torch's attention once.

    Args:
        name (`str`): what users call it, for the log.
        kernel: `xformers_kernel`, or a function of the same arguments.
        device (`str`): where the kernel computes.
    """

    def __init__(self, name: str = NAME, kernel: Kernel = xformers_kernel, device: str = "cuda") -> None:
        self.name, self.kernel, self.device = name, kernel, device
        self._said: set[str] = set()

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
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Attention of `(B, Hq, M, D)` queries: `(B, M, Hq, Dv)`.

        Raises:
            UnsupportedModelError: the model asks for something that neither xformers nor torch's attention knows.
        """
        self._check_arguments(module, kwargs)
        causal = is_causal if is_causal is not None else getattr(module, "is_causal", True)
        hides_future = attention_mask is None and causal and query.shape[2] > 1
        scaling = query.shape[-1] ** -0.5 if scaling is None else scaling
        if hides_future and query.shape[2] < key.shape[2]:
            attention_mask, hides_future = _causal(query, key), False
        is_small = attention_mask is None or fits(query, key, value, attention_mask)
        if not hides_future and is_small and not torch.compiler.is_compiling():  # kernels are chosen by Python
            if (reason := self.reason_against(query, key, value, dropout, kwargs)) is None:
                return attend(self.kernel, query, key, value, attention_mask, scaling), None
            if reason not in self._said:
                self._said.add(reason)
                logger.warning("%r attention uses torch's own instead: %s", self.name, reason)
        sdpa = attention_function_of("sdpa")
        assert sdpa is not None
        attended: tuple[torch.Tensor, torch.Tensor | None] = sdpa(
            module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, is_causal=is_causal, **kwargs
        )
        return attended

    def reason_against(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, dropout: float, kwargs: dict[str, Any]
    ) -> str | None:
        """Reason that is known without asking xformers, which composes a long message each time; or `None`."""
        if dropout or (torch.is_grad_enabled() and any(tensor.requires_grad for tensor in (query, key, value))):
            return "dropout or gradients are wanted"
        if kwargs.get("position_bias") is not None or kwargs.get("cache") is not None:
            return "layers have position biases of their own, or the cache is paged"
        if len(query) != len(key) or query.shape[1] % key.shape[1]:
            return "queries and keys do not go together by groups"
        if query.device.type != self.device:
            return f"xformers has no kernel for {query.device.type}"
        if query.dtype not in DTYPES or not query.dtype == key.dtype == value.dtype:
            return f"xformers has no kernel for {query.dtype}".replace("torch.", "")
        step = ALIGNMENT_BYTES // query.dtype.itemsize
        sizes = [size for size in (query.shape[-1], value.shape[-1]) if size % step]
        return f"xformers' kernels need heads of a multiple of {step} numbers, not {sizes[0]}" if sizes else None

    def _check_arguments(self, module: torch.nn.Module, kwargs: dict[str, Any]) -> None:
        """Raise for an argument that only the model's own attention function knows."""
        names = [name for name, value in kwargs.items() if value is not None and name not in HEEDED]
        code = inspect.unwrap(eager).__code__ if (eager := eager_attention_of(module)) is not None else None
        own = () if code is None else code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
        if unknown := next((name for name in names if name in UNKNOWN or name in own), None):
            raise UnsupportedModelError(
                f"{type(module).__name__} asks for {unknown!r}, which {self.name!r} attention does not know. "
                'Use attn_implementation="sdpa" or "eager", whichever the model has.'
            )


def attend(
    kernel: Kernel, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None, scale: float
) -> torch.Tensor:
    """Attention of `(B, Hq, M, D)` queries over `(B, Hkv, K, D)` keys; returns `(B, M, Hq, Dv)`.

    Args:
        kernel: as of `KernelAttention`.
        mask: `(B or 1, Hq or 1, M, K)`, of booleans or additive; `None` hides nothing.
    """
    (batch, num_heads, num_queries, head_dim), num_kv_heads = query.shape, key.shape[1]
    folded = query.reshape(batch, num_kv_heads, -1, head_dim).transpose(1, 2)  # a group's heads one behind the other
    bias = None
    if mask is not None:
        kind = (query.dtype, num_heads, num_kv_heads)
        bias = prepared(mask, kind, lambda: fold_bias(mask, *kind)).expand(batch, num_kv_heads, -1, -1)
    output = kernel(folded, key.transpose(1, 2), value.transpose(1, 2), bias, scale).transpose(1, 2)
    unfolded: torch.Tensor = output.reshape(batch, num_heads, num_queries, value.shape[-1]).transpose(1, 2)
    return unfolded.contiguous().to(query.dtype)


def fold_bias(mask: torch.Tensor, dtype: torch.dtype, num_heads: int, num_kv_heads: int) -> torch.Tensor:
    """`(B, 1 or Hq, M, K)` to an additive `(B, 1 or Hkv, g*M, K)` whose rows begin at multiples of 16 bytes.

    What hides a key is finite, and far from the end of the numbers: a row that sees nothing, as padding does, then
    comes out as some average and not as NaN.
    """
    batch, heads, num_queries, num_keys = mask.shape
    groups, kv_heads = num_heads // num_kv_heads, 1 if heads == 1 else num_kv_heads
    step = ALIGNMENT_BYTES // dtype.itemsize
    width = -(-num_keys // step) * step
    bias = torch.empty((batch, kv_heads, groups * num_queries, width), dtype=dtype, device=mask.device)
    values = additive(mask, dtype, lowest=-(2.0**15) if dtype == torch.float16 else -(2.0**100))
    by_group = bias.view(batch, kv_heads, groups, num_queries, width)[..., :num_keys]
    by_group.copy_(values.unsqueeze(2) if heads == 1 else values.reshape(by_group.shape))
    return bias[..., :num_keys]


def kernel_mask(*, q_length: int, kv_length: int, **kwargs: Any) -> Any:
    """A mask function in transformers' sense: that of torch's attention, also made where a static cache begins.

    There the last keys are not the text's, so that a missing mask would mean something else.
    """
    make = mask_function_of("sdpa")
    assert make is not None
    if q_length not in (1, kv_length):
        kwargs["allow_is_causal_skip"] = False
    return make(q_length=q_length, kv_length=kv_length, **kwargs)


def register(attention: KernelAttention | None = None) -> None:
    """Offer an attention, xformers' by default, and its masks to all models under its name; once.

    The mask function is as needful as the attention: without one, transformers hands models no mask at all.
    """
    name = NAME if attention is None else attention.name
    if attention_function_of(name) is None:
        register_attention(name, attention or KernelAttention())
    if mask_function_of(name) is None:
        register_mask_function(name, kernel_mask)


def asks_for_xformers(attn_implementation: Any) -> bool:
    """Returns whether a value of `attn_implementation`, a name or a dict of them, has ours in it."""
    if isinstance(attn_implementation, dict):
        return any(map(asks_for_xformers, attn_implementation.values()))
    return bool(attn_implementation == NAME)


def check_attention(model: PreTrainedModel, attn_implementation: Any = None) -> None:
    """Make `model.set_attn_implementation` know our name, and refuse it where the model cannot use it. Idempotent.

    Args:
        attn_implementation (`str` or `dict`, *optional*, defaults to the model's): what is asked for.

    Raises:
        MissingExtraError: xformers is not installed.
        ConfigError: the model's attention does not go through transformers' interface.
    """
    register()
    if not asks_for_xformers(attn_implementation or attention_implementation(model.config)):
        return
    check_installed()
    if not can_set_attention(model):
        rule = f"must be one that {type(model).__name__} has: its attention, or a part of it, is its own code"
        raise ConfigError("attn_implementation", rule, NAME, "Leave it out for this model.")


def check_installed() -> None:
    """Raise where xformers is not installed.

    Raises:
        MissingExtraError: with the line that installs it.
    """
    if importlib.util.find_spec("xformers") is None:
        raise MissingExtraError("xformers", "xformers", 'attn_implementation="xformers"')


def _causal(query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
    """Mask for a missing one: the queries are the last M of the text, each sees what is before it. `(1, 1, M, K)`.

    torch's flag says the same of as many queries as keys. Of fewer (Gemma 4 drops those whose logits no one wants) it
    takes the first keys.
    """
    num_queries, num_keys = query.shape[2], key.shape[2]
    mask = torch.ones((1, 1, num_queries, num_keys), dtype=torch.bool, device=query.device)
    return mask.tril(num_keys - num_queries)


def _operators() -> Any:
    """`xformers.ops.fmha`, ready for the torch that is here.

    Its wheel is built for one CUDA version. On another torch its own binary does not load, and every operator then
    refuses because xformers "wasn't built with CUDA". Those used here are torch's own
    (`aten::_flash_attention_forward`, `aten::_efficient_attention_forward`) and need nothing of that binary, so the
    refusal is lifted and the import's warning about it left out.
    """
    logger = logging.getLogger("xformers")
    before = logger.level
    logger.setLevel(logging.ERROR)
    try:
        from xformers.ops import fmha
        from xformers.ops.fmha import common
    finally:
        logger.setLevel(before)
    if torch.version.cuda is not None:
        setattr(common, "_built_with_cuda", True)  # noqa: B010
    return fmha
