"""Results of a model's probes, which are repeated once the model computes in another way."""

import functools
import threading
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from transformers import PreTrainedModel

from hf_specdec.compat.devices import input_device, is_shared
from hf_specdec.compat.fingerprint import Fingerprint, fingerprint
from hf_specdec.compat.state_layers import has_states_alone, known_state_layers
from hf_specdec.distributed.rank_sync import any_process
from hf_specdec.forward.capabilities.probe import Capability, probe, probe_rows, rounds_alike, untried
from hf_specdec.forward.capabilities.reference import ProbeFailed, module_tensors
from hf_specdec.kernels import cpu
from hf_specdec.kernels.cpu_kernels import reason_for_width
from hf_specdec.kernels.layers import Attended, counted

Finding = TypeVar("Finding")
MOST_KEPT = 8  # adapters and attention implementations that a model changes between
_stance_lock = threading.RLock()  # torch has one stance for the whole process


class Found:
    """Results of the probes of a model in one state.

    Attributes:
        capability (`Capability`): how it is driven.
    """

    def __init__(self, capability: Capability, attended: Attended | None = None) -> None:
        self.capability, self._attended = capability, attended
        self._results: dict[str, Any] = {}  # of later probes, by what was tried
        self._rounding_reasons: dict[int, str | None] = {}  # by the number of threads
        self._lock = threading.Lock()

    def batch_fallback_reason(self, model: PreTrainedModel, encoder_kwargs: dict[str, Any] | None = None) -> str | None:
        """Reason to decode batches plainly, or `None`; the model is probed at its first batch.

        Arguments as of `Findings.of`.
        """
        reason = "several sequences at once could not be tried"
        find = functools.partial(probe_rows, model, encoder_kwargs)
        return self._probed(model, "rows", find, lambda error: f"{reason}: {error}")

    def rounding_reason(self, model: PreTrainedModel) -> str | None:
        """Reason why a token's logits may depend on the others of its forward, by their rounding; `None` where they do
        not: the core computes every sum in one order, and the probe found no other bit.
        """
        if cpu.is_watched():
            return "a setting or mode of torch leaves all to its kernels, which are chosen by the number of tokens"
        threads = torch.get_num_threads()
        if threads not in self._rounding_reasons:
            self._rounding_reasons[threads] = reason_for_width(model) or self._reason_of_trial(model)
        return self._rounding_reasons[threads]

    def _reason_of_trial(self, model: PreTrainedModel) -> str | None:
        """Reason that the probe's forwards have shown, or `None`."""
        attended = self._attended or Attended()
        if attended.by_torch:
            return f"torch computes {', '.join(sorted(attended.by_torch))}, and rounds by the number of tokens"
        if not attended.by_core and not has_states_alone(model):
            return "the core has computed no attention when the model was tried"
        if self.capability.error != 0.0 and not self._rounds_states_alike(model):
            return "a trial forward of several tokens rounded otherwise than forwards of one"
        return None

    def _rounds_states_alike(self, model: PreTrainedModel) -> bool:
        """True if recurrent layers round a tree as its nodes alone, which plain `generate` computes by other code."""
        if self.capability.tier != "tree" or not known_state_layers(model):
            return False
        return self._probed(model, "rounding", functools.partial(rounds_alike, model), lambda error: False)

    def _probed(
        self,
        model: PreTrainedModel,
        key: str,
        find: Callable[[], Finding],
        failed: Callable[[ProbeFailed], Finding],
    ) -> Finding:
        """Result of `find`, kept under `key`; `failed` says what holds for a call whose probe failed."""
        with self._lock:
            if any_process(model, key not in self._results):
                try:
                    self._results[key] = _undisturbed(model, find)
                except ProbeFailed as error:
                    _raise_if_shared(error, model)
                    return failed(error)
            result: Finding = self._results[key]
            return result


class Findings:
    """Results of one model's probes by its fingerprint. Safe to share between threads; a copy begins with nothing."""

    def __init__(self) -> None:
        self._known: dict[Fingerprint, Found] = {}
        self._lock = threading.Lock()

    def of(
        self,
        model: PreTrainedModel,
        encoder_kwargs: dict[str, Any] | None = None,
        *,
        now: Fingerprint | None = None,
    ) -> Found:
        """Results for the model as it is now, probed at first; a probe that failed is repeated at the next call.

        All processes that share the model probe if one has to.

        Args:
            encoder_kwargs: of encoder-decoder models, see `probe`.
            now: the model's fingerprint, where it is known.
        """
        key = now or fingerprint(model)
        with self._lock:
            if not any_process(model, key not in self._known):
                return self._known[key]
            try:
                with counted() as attended:
                    results = Found(_undisturbed(model, lambda: probe(model, encoder_kwargs)), attended)
            except ProbeFailed as error:
                _raise_if_shared(error, model)
                return Found(untried(model, error))
            self._keep(key, results)
            return results

    def _keep(self, key: Fingerprint, results: Found) -> None:
        self._known.pop(key, None)
        while len(self._known) >= MOST_KEPT:
            del self._known[next(iter(self._known))]
        self._known[key] = results

    def __reduce__(self) -> tuple[type["Findings"], tuple[()]]:
        return Findings, ()


def _raise_if_shared(error: ProbeFailed, model: PreTrainedModel) -> None:
    """Raise what a probe met where other processes wait for it in the middle of a forward."""
    if is_shared(model):
        raise (error.__cause__ or error) from None


def _undisturbed(model: PreTrainedModel, find: Callable[[], Finding]) -> Finding:
    """Result of `find`; a compiled model's recompilations, its rows and the random numbers are left to the call.

    So are states that modules keep (RecurrentGemma). Forwards in train mode draw random numbers, and Reformer's.
    """
    device, states = input_device(model), module_tensors(model)
    of_device = {"devices": [] if device.type == "cpu" else [device], "device_type": device.type}
    with _stance_lock, torch.compiler.set_stance("force_eager"), torch.random.fork_rng(**of_device):
        try:
            return find()
        finally:
            for module, name, tensor in states:
                if vars(module).get(name) is not tensor:
                    setattr(module, name, tensor)
