"""Attempts at forwards that a model may fail at: retried once, and their errors in a sentence."""

import logging
from collections.abc import Callable
from typing import TypeVar

import torch
from accelerate.utils.memory import should_reduce_batch_size

from hf_specdec.errors import UnsupportedModelError

Result = TypeVar("Result")
logger = logging.getLogger("hf_specdec")
ATTEMPTS = 2


class Mismatch(Exception):
    """A forward gave other logits or states than the reference."""


class ProbeFailed(Exception):
    """A probe met a fault that may pass, such as a full memory: nothing is known of the model."""


# What forwards raise where a model does not allow for what is tried.
REFUSALS = (ArithmeticError, AssertionError, AttributeError, LookupError, Mismatch, RuntimeError, TypeError, ValueError)


def tried(attempt: Callable[[int], Result]) -> Result:
    """The result of `attempt(number)`. What a model cannot do fails each time, an expert's near tie does not.

    Raises:
        REFUSALS: of the last attempt.
        ProbeFailed: what was raised says nothing of the model.
    """
    for number in range(ATTEMPTS):
        try:
            return attempt(number)
        except ProbeFailed:
            raise
        except REFUSALS as error:
            if _may_pass(error):
                raise ProbeFailed(f"{type(error).__name__}: {error}") from error
            if number == ATTEMPTS - 1 or isinstance(error, UnsupportedModelError):
                raise
        except Exception as error:
            raise ProbeFailed(f"{type(error).__name__}: {error}") from error
    raise AssertionError


def _may_pass(error: Exception) -> bool:
    """Returns whether an error is the machine's: its memory is full, or the device has failed."""
    return isinstance(error, torch.OutOfMemoryError | torch.AcceleratorError) or should_reduce_batch_size(error)


def sentence(exception: Exception) -> str:
    """An exception in one line, for people who have not read the model's code."""
    if isinstance(exception, (Mismatch, UnsupportedModelError)):
        return str(exception).split(". ")[0].removesuffix(".")
    logger.debug("a forward that tries the model fails", exc_info=exception)
    return f"its forward does not allow for it ({type(exception).__name__})"
