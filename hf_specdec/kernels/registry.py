"""`attn_implementation="xformers"`: the name in transformers' registries, and what has to hold of who asks for it.

register()                                      # cheap; imports nothing
check_attention(model)                          # refuses a model that has it and cannot use it
"""

from typing import Any

from transformers import PreTrainedModel

from hf_specdec.compat import attention_implementation, mask_function_of, register_mask_function
from hf_specdec.compat.attention import attention_function_of, can_set_attention, register_attention
from hf_specdec.errors import ConfigError
from hf_specdec.kernels.attention import KernelAttention, kernel_mask
from hf_specdec.kernels.xformers import XformersKernel, check_installed

NAME = "xformers"


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
    """Returns whether what stands for `attn_implementation`, a name or a dict of them, has ours in it."""
    if isinstance(attn_implementation, dict):
        return any(map(asks_for_xformers, attn_implementation.values()))
    return bool(attn_implementation == NAME)


def check_model(model: PreTrainedModel) -> None:
    """Refuse a model whose attention would not use the kernel but take its masks for those of its own code.

    Raises:
        MissingExtraError: xformers is not installed.
        ConfigError: the model's attention does not go through transformers' interface.
    """
    check_installed()
    if not can_set_attention(model):
        rule = f"must be one that {type(model).__name__} has: its attention, or a part of it, is its own code"
        raise ConfigError("attn_implementation", rule, NAME, "Leave it out for this model.")


def check_attention(model: PreTrainedModel) -> None:
    """Make `model.set_attn_implementation` know our name; called by `enable`. Idempotent.

    Raises:
        ConfigError: the model has the implementation already and cannot use it.
    """
    register()
    check_asked(model, attention_implementation(model.config))


def check_asked(model: PreTrainedModel, attn_implementation: Any) -> None:
    """Refuse ours, a name or one in a dict of them, for a model that cannot use it.

    Raises:
        MissingExtraError: xformers is not installed.
        ConfigError: the model's attention does not go through transformers' interface.
    """
    if asks_for_xformers(attn_implementation):
        check_model(model)
