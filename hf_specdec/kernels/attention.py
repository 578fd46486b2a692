"""`attn_implementation="xformers"`: one kernel as attention function, and torch's or the model's own where it has none.

register()                                      # cheap; imports no xformers
check_attention(model)                          # refuses a model that has it and cannot use it

What a model asks of its attention beyond scaled scores and a mask (soft-capping, sinks) only its own function knows.
What the kernel cannot do goes to torch's, and the reason is said once.
"""

import inspect
import logging
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
from hf_specdec.errors import ConfigError, UnsupportedModelError
from hf_specdec.kernels.grouped import fits
from hf_specdec.kernels.masks import additive, prepared
from hf_specdec.kernels.xformers import XformersKernel, attend, check_installed

logger = logging.getLogger("hf_specdec")

NAME = "xformers"

# Arguments that change the result and that torch's attention refuses or, worse, ignores.
ONLY_EAGER = ("softcap", "s_aux", "sinks")
# Keys that a model has chosen by itself: it hides the others in the masks of "sdpa" and "eager", known by name, only.
CHOSEN_KEYS = ("indices", "block_indices")
# Arguments that models' own functions name and that are heeded here: the mask carries windows.
HEEDED = ("position_bias", "sliding_window")


class KernelAttention:
    """The attention function of one kernel; remembers what it has said.

    Args:
        name (`str`): what users call it, for the log.
        kernel (`XformersKernel`): it, or one with its methods.
    """

    def __init__(self, name: str, kernel: Any) -> None:
        self.name, self.kernel = name, kernel
        self._said: set[str] = set()
        self._without_kernel: dict[tuple[Any, ...], str] = {}

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
        """Attention of `(B, Hq, M, D)` queries; returns `(B, M, Hq, Dv)` and the weights, where they are computed.

        Raises:
            UnsupportedModelError: the model asks for something that only its own function knows, and it has none, or
                leaves the choice of keys to the attention.
        """
        causal = is_causal if is_causal is not None else getattr(module, "is_causal", True)
        hides_future = attention_mask is None and causal and query.shape[2] > 1
        scaling = query.shape[-1] ** -0.5 if scaling is None else scaling
        if hides_future and query.shape[2] < key.shape[2]:
            attention_mask, hides_future = _causal(query, key), False
        if extra := _only_eager(module, kwargs):
            eager = eager_attention_of(module)
            if eager is None or extra in CHOSEN_KEYS:
                other = "sdpa" if extra in CHOSEN_KEYS else "eager"
                raise UnsupportedModelError(
                    f"{type(module).__name__} asks for {extra!r}, which {self.name!r} attention does not know. "
                    f'Use attn_implementation="{other}".'
                )
            mask = _for_eager(_causal(query, key) if hides_future else attention_mask, query.dtype)
            output: tuple[torch.Tensor, torch.Tensor | None] = eager(
                module, query, key, value, mask, dropout=dropout, scaling=scaling, **kwargs
            )
            return output
        if not hides_future and (attention_mask is None or fits(query, key, value, attention_mask)):
            result = self._by_kernel(query, key, value, attention_mask, dropout, scaling, kwargs)
            if result is not None:
                return result, None
        sdpa = attention_function_of("sdpa")
        assert sdpa is not None
        attended: tuple[torch.Tensor, torch.Tensor | None] = sdpa(
            module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, is_causal=is_causal, **kwargs
        )
        return attended

    def _by_kernel(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        mask: torch.Tensor | None,
        dropout: float,
        scaling: float,
        kwargs: dict[str, Any],
    ) -> torch.Tensor | None:
        """The kernel's result, or `None` where it has none; why is said once."""
        if torch.compiler.is_compiling():
            return None  # a kernel is chosen by Python that cannot be compiled
        reason = _reason_against(query, key, value, dropout, kwargs)
        kind = (query.dtype, query.device.type, query.shape[-1], value.shape[-1])
        reason = reason or self._without_kernel.get(kind) or self.kernel.reason_against(query, key, value)
        if reason is None:
            try:
                return attend(self.kernel, query, key, value, mask, scaling)
            except NotImplementedError as error:
                reason = self._without_kernel[kind] = " ".join(str(error).split())
        if reason not in self._said:
            self._said.add(reason)
            logger.warning("%r attention uses torch's own instead: %s", self.name, reason)
        return None


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
    """Offer an attention, xformers' unless another is given, and its masks to all models under its name; once.

    The mask function is as needful as the attention: without one, transformers hands models no mask at all.
    """
    name = NAME if attention is None else attention.name
    if attention_function_of(name) is None:
        register_attention(name, attention or KernelAttention(NAME, XformersKernel()))
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


def _reason_against(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, dropout: float, kwargs: dict[str, Any]
) -> str | None:
    """Reason why no kernel of this form computes it, or `None`."""
    if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in (query, key, value)):
        return "gradients are wanted"
    if dropout:
        return "dropout is wanted"
    if kwargs.get("position_bias") is not None:
        return "each layer has a position bias of its own"
    if kwargs.get("cache") is not None:
        return "the cache is paged"
    if len(query) != len(key) or query.shape[1] % key.shape[1]:
        return "queries and keys do not go together by groups"
    return None


def _only_eager(module: torch.nn.Module, kwargs: dict[str, Any]) -> str | None:
    """An argument that only the model's own function knows, if there is one."""
    names = [name for name, value in kwargs.items() if value is not None]
    for name in (*CHOSEN_KEYS, *ONLY_EAGER):
        if name in names:
            return name
    eager = eager_attention_of(module)
    if eager is None:
        return None
    return next((name for name in names if _is_named_by(eager, name)), None)


def _is_named_by(function: Any, name: str) -> bool:
    """Returns whether a model's own attention function names an argument that is not heeded here."""
    code = inspect.unwrap(function).__code__
    return name not in HEEDED and name in code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]


def _for_eager(mask: torch.Tensor | None, dtype: torch.dtype) -> torch.Tensor | None:
    """Models add their masks to the scores; added booleans would be ones and zeros."""
    if mask is None or mask.dtype != torch.bool:
        return mask
    return prepared(mask, ("eager", dtype), lambda: additive(mask, dtype))


def _causal(query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
    """Mask for a missing one: the queries are the last M of the text, each sees what is before it. `(1, 1, M, K)`.

    torch's flag says the same of as many queries as keys. Of fewer (Gemma 4 drops those whose logits no one wants) it
    takes the first keys.
    """
    num_queries, num_keys = query.shape[2], key.shape[2]
    mask = torch.ones((1, 1, num_queries, num_keys), dtype=torch.bool, device=query.device)
    return mask.tril(num_keys - num_queries)
