"""What this package keeps on a model: defaults of `enable`, what the probe found, memories of the methods.

It lives in the model's `__dict__`, so it is copied, pickled and dropped with the model, and no module holds state.
"""

import contextlib
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import PreTrainedModel

from hf_specdec.capabilities.probe import Capability, probe
from hf_specdec.capabilities.probe_rows import probe_rows
from hf_specdec.compat import attention_implementation
from hf_specdec.engine.cost_facts import check_facts
from hf_specdec.engine.cost_model import StepCosts
from hf_specdec.forward.adapters import works_by_hooks
from hf_specdec.methods.config import SpecConfig
from hf_specdec.methods.method import MethodState

__all__ = ["ATTRIBUTE", "ModelState", "remembering", "state_of"]

ATTRIBUTE = "_hf_specdec"
_stance_lock = threading.RLock()  # torch has one stance for the whole process
Key = tuple[str | None, str, bool]  # what a finding depends on: attention implementation, dtype, whether hooks act


@dataclass(slots=True)
class ModelState:
    """One model's state. Safe to share between threads; the lock is made anew in a copy."""

    defaults: dict[str, SpecConfig] = field(default_factory=dict)
    memory: MethodState = field(default_factory=MethodState)
    capabilities: dict[Key, Capability] = field(default_factory=dict)
    against_rows: dict[Key, str | None] = field(default_factory=dict)
    costs: dict[tuple[Any, ...], StepCosts] = field(default_factory=dict)
    said: set[str] = field(default_factory=set)
    lock: Any = field(default_factory=threading.Lock, repr=False, compare=False)

    def capability(self, model: PreTrainedModel, encoder_kwargs: dict[str, Any] | None = None) -> Capability:
        """The probe's finding for the model as it is now; probed once for each attention implementation and dtype."""
        key = _key(model)
        with self.lock:
            found = self.capabilities.get(key)
            if found is None:
                with _uncompiled():
                    found = probe(model, encoder_kwargs)
                if not model.training:
                    self.capabilities[key] = found
            return found

    def batch_fallback_reason(self, model: PreTrainedModel, encoder_kwargs: dict[str, Any] | None = None) -> str | None:
        """Why batches are decoded plainly, or `None`; probed like the capability, at the first batch."""
        tier = self.capability(model, encoder_kwargs).tier
        key = _key(model)
        with self.lock:
            if key not in self.against_rows or model.training:
                with _uncompiled():
                    self.against_rows[key] = probe_rows(model, tier, encoder_kwargs)
            return self.against_rows[key]

    def step_costs(self, model: PreTrainedModel, device: torch.device, path: str | None = None) -> StepCosts:
        """What forwards of the model as it is now cost on `device`; `path` is a file of costs to begin with."""
        key = (*_key(model), str(device), torch.get_num_threads(), path)
        with self.lock:
            if key not in self.costs:
                costs = StepCosts.of_device(device)
                if path is not None:
                    costs.load(path)
                    check_facts(costs.facts, model, device, path)
                self.costs[key] = costs
            return self.costs[key]

    def first_time(self, what: str) -> bool:
        """Whether `what` has not been said about this model yet."""
        with self.lock:
            new = what not in self.said
            self.said.add(what)
        return new

    def __getstate__(self) -> dict[str, Any]:
        names = ("defaults", "memory", "capabilities", "against_rows", "costs", "said")
        return {name: getattr(self, name) for name in names}

    def __setstate__(self, state: dict[str, Any]) -> None:
        for name, value in state.items():
            setattr(self, name, value)
        self.lock = threading.Lock()


@contextlib.contextmanager
def _uncompiled() -> Iterator[None]:
    """Run compiled models as they were written: a probe's forwards would use up the recompilations of the real ones."""
    with _stance_lock, torch.compiler.set_stance("force_eager"):
        yield


def _key(model: PreTrainedModel) -> Key:
    return attention_implementation(model.config), str(model.dtype), works_by_hooks(model)


def state_of(model: PreTrainedModel) -> ModelState:
    """The model's state, made at first use."""
    state: ModelState = model.__dict__.setdefault(ATTRIBUTE, ModelState())
    return state


@contextlib.contextmanager
def remembering(model: PreTrainedModel, memory: MethodState) -> Iterator[None]:
    """Let the methods remember in `memory` for a while, and in the model's own again afterwards."""
    state = state_of(model)
    own, state.memory = state.memory, memory
    try:
        yield
    finally:
        state.memory = own
