"""Limits of Mamba-2's time step, which transformers applies in a forward of several tokens and not in one of one token.

Zamba2 and Nemotron-H have a lower limit, others only where their configuration asks for one. Plain generation computes
one token a forward, so a draft's tokens are computed without the limit too.
"""

import threading
from contextvars import ContextVar, Token
from typing import Any, SupportsIndex

from transformers import PreTrainedModel

from hf_specdec.compat.modules import modules_of
from hf_specdec.forward.model_facts import ModelFacts

NAME = "time_step_limit"  # the layers' attribute, `(lowest, highest)`
NO_LIMIT = (0.0, float("inf"))

_is_lifted: ContextVar[bool] = ContextVar("hf_specdec_time_step_limit_is_lifted", default=False)
_lock = threading.Lock()


class TimeStepLimits:
    """A block in which this thread's forwards of one model do not limit the time step; those of other threads do."""

    def __init__(self, model: PreTrainedModel, facts: ModelFacts) -> None:
        layers = [vars(layer) for layer in facts.of(_layers, model)]
        self._layers = [attributes for attributes in layers if tuple(attributes[NAME]) != NO_LIMIT]
        self._token: Token[bool] | None = None

    def __enter__(self) -> None:
        if not self._layers:
            return
        with _lock:
            for attributes in self._layers:
                if not isinstance(attributes[NAME], _Limit):
                    attributes[NAME] = _Limit(attributes[NAME])
                attributes[NAME].num_blocks += 1
        self._token = _is_lifted.set(True)  # last: an interrupt before it leaves the limit as it reads

    def __exit__(self, *_: object) -> None:
        if self._token is None:
            return
        _is_lifted.reset(self._token)
        self._token = None
        with _lock:
            for attributes in self._layers:
                attributes[NAME].num_blocks -= 1
                if not attributes[NAME].num_blocks:
                    attributes[NAME] = tuple(attributes[NAME])


class _Limit(tuple[float, ...]):
    """A layer's limit, which the threads that lift it do not see.

    Attributes:
        num_blocks: those that lift it, of all threads.
    """

    num_blocks = 0

    def __getitem__(self, index: SupportsIndex | slice) -> Any:
        return NO_LIMIT[index] if _is_lifted.get() else super().__getitem__(index)


def _layers(model: PreTrainedModel) -> tuple[Any, ...]:
    """The layers of transformers' models with such an attribute."""
    return tuple(m for m in modules_of(model) if NAME in vars(m) and type(m).__module__.startswith("transformers."))
