"""The forwards of one call that are not compiled: replayed where a record of them is there."""

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

from transformers import PreTrainedModel

from hf_specdec.cache.spec_cache import SpecCache
from hf_specdec.common.packed_rows import PackedRows
from hf_specdec.forward.model_facts import ModelFacts
from hf_specdec.forward.recorded.forwards import RecordedForwards
from hf_specdec.forward.state_layers import StateRecorder
from hf_specdec.forward.text_rows import TreeLayout
from hf_specdec.kernels.cpu_kernels import CpuKernels


class CallForwards:
    """One call's forwards.

    Args:
        recorder: records states of layers that have some.
        kernels: compute layers and attention of forwards by the model's own code.
        is_recordable (`bool`): whether the model keeps keys, values and states in a cache of this package.
        is_undisturbed (`bool`): whether no code of the caller's runs between the forwards: it might change the model.

    Attributes:
        num_replayed (`int`): forwards that the core has replayed.
        is_usual (`bool`): whether forwards of as many tokens as the last one's take as long from now on.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        facts: ModelFacts,
        recorder: StateRecorder,
        kernels: CpuKernels,
        *,
        is_recordable: bool,
        is_undisturbed: bool = False,
    ) -> None:
        self._model, self._recorder, self._kernels = model, recorder, kernels
        self.num_replayed, self.is_usual = 0, True
        self._call = object() if is_undisturbed else None
        self._recorded = facts.of(RecordedForwards, model) if is_recordable else None
        if self._recorded is not None:
            self._recorded.begin(model)

    def of(self, model: PreTrainedModel) -> "CallForwards":
        """The same for a part of the model, which is not recorded."""
        return CallForwards(model, ModelFacts(), self._recorder, self._kernels, is_recordable=False)

    @property
    def needs_masks(self) -> bool:
        """Returns whether every forward of several tokens gets its mask as an argument."""
        return self._recorded is not None and self._recorded.reason is None

    @property
    def reason(self) -> str | None:
        """Reason why no forward was recorded; `None` where some were, or were too few."""
        return None if self._recorded is None or self.num_replayed else self._recorded.last_reason

    @contextlib.contextmanager
    def computing(
        self, cache: SpecCache | None, layouts: Sequence[TreeLayout], packed: PackedRows | None
    ) -> Iterator[None]:
        """A block in which the model's own code, or its graph, computes the columns that are there."""
        self._recorder.begin(cache, layouts)
        with self._applied(cache, packed):
            yield

    @contextlib.contextmanager
    def _applied(self, cache: SpecCache | None, packed: PackedRows | None) -> Iterator[None]:
        recorded, packing = self._recorder.applied(cache), self._kernels.packing(packed)
        written = contextlib.nullcontext() if cache is None else cache.packing(packed)
        with recorded, self._kernels, packing, written:
            yield

    def __call__(
        self,
        inputs: dict[str, Any],
        cache: SpecCache | None,
        layouts: Sequence[TreeLayout],
        packed: PackedRows | None,
    ) -> Any:
        """The outputs of a forward, by a record or by the model's own code."""

        self._recorder.begin(cache, layouts)

        def compute() -> Any:
            with self._applied(cache, packed):
                return self._model(**inputs, return_dict=True)

        if self._recorded is None or cache is None:
            return compute()
        forward = self._recorded.forward(compute, self._model, inputs, cache, packed, self._call)
        self.num_replayed += forward.is_replayed
        self.is_usual = forward.is_usual
        return forward.outputs
