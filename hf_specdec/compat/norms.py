"""RMSNorm as most of transformers' models have it.

Names                              Why
`LlamaRMSNorm`                     each model has a class of its own, some 140 of them with this one's code
"""

import functools
import types
from typing import TypeGuard

import torch
from transformers.models.llama.modeling_llama import LlamaRMSNorm as LlamaRMSNorm

CODE = ("co_code", "co_names", "co_varnames", "co_consts")
LLAMAS = LlamaRMSNorm.forward  # before anybody replaces it


def is_rms_norm(module: torch.nn.Module) -> TypeGuard[LlamaRMSNorm]:
    """True if the module's class computes `weight * (x / sqrt(mean(x ** 2) + variance_epsilon))` as Llama's does.

    Told by the code of its `forward`: a class that rounds or scales in another way is no such norm, nor is one whose
    `forward` was replaced.
    """
    forward = getattr(type(module), "forward", None)  # which modules of TorchScript lack
    return isinstance(forward, types.FunctionType) and _is_llamas(forward)


@functools.cache
def _is_llamas(forward: types.FunctionType) -> bool:
    if LLAMAS.__module__ != LlamaRMSNorm.__module__:  # somebody did
        return False
    return all(getattr(forward.__code__, name) == getattr(LLAMAS.__code__, name) for name in CODE)
