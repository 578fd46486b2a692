"""The forwards of one call that are not compiled: replayed where a record of them is there."""

from collections.abc import Callable
from typing import Any

from transformers import PreTrainedModel

from hf_specdec.cache.spec_cache import SpecCache
from hf_specdec.common.packed_rows import PackedRows
from hf_specdec.forward.model_facts import ModelFacts
from hf_specdec.forward.recorded.forwards import RecordedForwards


class CallForwards:
    """One call's forwards.

    Args:
        is_recordable (`bool`): whether the model's layers keep keys and values alone, in a cache of this package.

    Attributes:
        num_replayed (`int`): forwards that the core has replayed.
        is_usual (`bool`): whether forwards of as many tokens as the last one's take as long from now on.
    """

    def __init__(self, model: PreTrainedModel, facts: ModelFacts, *, is_recordable: bool) -> None:
        self._model, self.num_replayed, self.is_usual = model, 0, True
        self._recorded = facts.of(RecordedForwards, model) if is_recordable else None
        if self._recorded is not None:
            self._recorded.begin(model)

    @property
    def needs_masks(self) -> bool:
        """Returns whether every forward of several tokens gets its mask as an argument."""
        return self._recorded is not None and self._recorded.reason is None

    @property
    def reason(self) -> str | None:
        """Reason why no forward was recorded; `None` where some were, or were too few."""
        return None if self._recorded is None or self.num_replayed else self._recorded.last_reason

    def __call__(
        self,
        compute: Callable[[], Any],
        inputs: dict[str, Any],
        cache: SpecCache | None,
        packed: PackedRows | None,
    ) -> Any:
        """The outputs of a forward, by a record or by `compute`, the model's own code."""
        if self._recorded is None or cache is None:
            return compute()
        forward = self._recorded.forward(compute, self._model, inputs, cache, packed)
        self.num_replayed += forward.is_replayed
        self.is_usual = forward.is_usual
        return forward.outputs
