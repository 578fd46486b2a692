"""Errors of a compiled forward: tells the compiler's from those of a hook that has run.

Names                              Why
`_forward_hooks` and the like      the hooks of a module, and of all modules (see `fingerprint`)
`torch._dynamo.exc`                what torch's compiler raises by itself
`torch_dynamo_resume_in_`          how it names the rest of a function of which it could trace the beginning alone
"""

import functools
import re
import traceback
from types import CodeType, MethodType
from typing import Any

import torch
from torch.nn.modules import module as torch_module

from hf_specdec.compat.fingerprint import GLOBAL_HOOKS, HOOKS
from hf_specdec.compat.modules import modules_of

RESUMED = re.compile(r"^torch_dynamo_resume_in_|_at_\d+$")


def raised_in_hook(error: BaseException, module: torch.nn.Module) -> bool:
    """Returns whether a hook of the module, of its parts or of all modules has raised `error`, or has called what did.

    A hook that the compiler traces does not run, so that no frame of the error is one of the hook's.
    """
    from torch._dynamo.exc import TorchDynamoException

    if isinstance(error, TorchDynamoException):
        return False
    own = (vars(part).get(name) for part in modules_of(module) for name in HOOKS)
    found = [*own, *(getattr(torch_module, name) for name in GLOBAL_HOOKS)]
    codes = [_code_of(hook) for hooks in found if hooks for hook in hooks.values()]
    places = {(code.co_filename, code.co_name) for code in codes if code is not None}
    frames = (frame.f_code for frame, _ in traceback.walk_tb(error.__traceback__))
    return any((frame.co_filename, RESUMED.sub("", frame.co_name)) in places for frame in frames)


def _code_of(hook: Any) -> CodeType | None:
    """Code object of a hook; `None` for one that is not written in Python."""
    while isinstance(hook, functools.partial | MethodType):
        hook = hook.func if isinstance(hook, functools.partial) else hook.__func__
    code = getattr(hook, "__code__", None) or getattr(type(hook).__call__, "__code__", None)
    return code if isinstance(code, CodeType) else None
