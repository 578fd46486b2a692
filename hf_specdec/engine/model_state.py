"""State that the package keeps on a model: defaults of `enable`, results of the probes, memories of the methods.

It lives in the model's `__dict__`, so it is copied, pickled and dropped with the model.
"""

import contextlib
import logging
import threading
from collections.abc import Hashable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import PreTrainedModel

from hf_specdec.cache.prefix_cache import WeightsVersion
from hf_specdec.compat.attention import attention_implementation
from hf_specdec.compat.devices import load_factor
from hf_specdec.compat.fingerprint import Fingerprint
from hf_specdec.engine.cost.cost_model import StepCosts
from hf_specdec.forward.capabilities.findings import Findings
from hf_specdec.forward.compiled_forward import MODEL_STEP, CompiledForward, StepKind
from hf_specdec.forward.model_facts import STATE_ATTRIBUTE, ModelFacts
from hf_specdec.methods.common.config import SpecConfig
from hf_specdec.methods.common.draft_head import DraftHead
from hf_specdec.methods.common.entry import MethodState

ATTRIBUTE = STATE_ATTRIBUTE
NOT_COPIED = ("lock", "compiled", "facts", "weights")
MOST_WARNINGS = 100  # some name a length or a value of the call
logger = logging.getLogger("hf_specdec")


@dataclass(slots=True)
class ModelState:
    """One model's state. Safe to share between threads; a copy is of one moment, with a lock of its own."""

    defaults: dict[str, SpecConfig] = field(default_factory=dict)
    method_state: MethodState = field(default_factory=MethodState)
    findings: Findings = field(default_factory=Findings)
    heads: dict[str, DraftHead] = field(default_factory=dict)  # those of the model's own checkpoint, by method
    costs: dict[tuple[Any, ...], StepCosts] = field(default_factory=dict)
    warned: dict[str, None] = field(default_factory=dict)  # messages, in the order in which they were given
    plain_kernels: bool | None = None  # whether calls that transformers decodes have the kernels; `None`: in 16 bits
    keeps_settings: bool = False  # whether `enable` had to make the generation configuration keep them
    compiled: dict[str, CompiledForward] = field(default_factory=dict, repr=False, compare=False)
    facts: tuple[Hashable, ModelFacts] | None = field(default=None, repr=False, compare=False)  # with their structure
    weights: WeightsVersion = field(default_factory=WeightsVersion, repr=False, compare=False)
    lock: Any = field(default_factory=threading.Lock, repr=False, compare=False)

    def step_costs(
        self,
        model: PreTrainedModel,
        device: torch.device,
        *,
        is_fixed: bool = False,
        is_static: bool = False,
    ) -> StepCosts:
        """Costs of the model's forwards on `device`, as the model is now.

        Args:
            is_fixed: whether no step corrects them.
            is_static: whether they go over a static cache, where they may be compiled.
        """
        attention, threads = attention_implementation(model.config), torch.get_num_threads()
        loading = load_factor(model)
        key = (attention, str(model.dtype), str(device), threads, is_fixed, is_static, loading)
        with self.lock:
            if key not in self.costs:
                self.costs[key] = StepCosts.of_device(device, loading=loading, is_fixed=is_fixed)
            return self.costs[key]

    def compiled_forward(self, model: Any, settings: dict[str, Any], kind: StepKind = MODEL_STEP) -> CompiledForward:
        """Compiled forward of the model as it is now; graphs are not copied with the model.

        Args:
            model: a model or a draft head.
            kind: of `CompiledForward`.
        """
        attention = attention_implementation(model.config) if isinstance(model, PreTrainedModel) else None
        key = repr((attention, str(model.dtype), sorted(settings.items(), key=str), kind.make.__name__))
        with self.lock:
            if key not in self.compiled:
                self.compiled[key] = CompiledForward(model, settings, kind)
            return self.compiled[key]

    def facts_of(self, now: Fingerprint) -> ModelFacts:
        """Facts of the model's structure, the model being as `now` says."""
        with self.lock:
            if self.facts is None or self.facts[0] != now.structure:
                self.facts = now.structure, ModelFacts()
            return self.facts[1]

    def warn_once(self, message: str) -> None:
        """Log a warning that is not among the last `MOST_WARNINGS` ones of this model."""
        with self.lock:
            if message in self.warned:
                return
            if len(self.warned) >= MOST_WARNINGS:
                del self.warned[next(iter(self.warned))]
            self.warned[message] = None
        logger.warning(message)

    def __getstate__(self) -> dict[str, Any]:
        with self.lock:
            kept = {name: getattr(self, name) for name in self.__slots__ if name not in NOT_COPIED}
            return {name: dict(value) if isinstance(value, dict) else value for name, value in kept.items()}

    def __setstate__(self, state: dict[str, Any]) -> None:
        for name, value in state.items():
            setattr(self, name, value)
        self.lock, self.compiled, self.facts, self.weights = threading.Lock(), {}, None, WeightsVersion()


def state_of(model: torch.nn.Module) -> ModelState:
    """The state of a model or a draft head, made at first use."""
    state: ModelState | None = model.__dict__.get(ATTRIBUTE)
    return model.__dict__.setdefault(ATTRIBUTE, ModelState()) if state is None else state


@contextlib.contextmanager
def using_method_state(model: PreTrainedModel, method_state: MethodState) -> Iterator[None]:
    """Let the methods keep what they learn in `method_state` for a while, and on the model again afterwards."""
    state = state_of(model)
    before, state.method_state = state.method_state, method_state
    try:
        yield
    finally:
        state.method_state = before
