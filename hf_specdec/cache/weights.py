"""Notices that a model has other weights than before: what was computed from the old ones serves no text any more."""

import weakref

import torch

from hf_specdec.compat.modules import saved_weights, write_count


class WeightsVersion:
    """Identifies the weights that a model has at a moment.

    Sees a parameter or saved buffer that was replaced, given other memory, or written over in place, as by an optimizer
    or `load_state_dict`. Does not see writes through `.data`, which torch does not count either.
    """

    def __init__(self) -> None:
        self._seen: list[tuple[weakref.ref[torch.Tensor], int, int]] = []
        self._version = object()

    def of(self, model: torch.nn.Module) -> object:
        """The object that stands for the model's weights, another one after each change."""
        weights = saved_weights(model)
        seen = [(reference(), *numbers) for reference, *numbers in self._seen]
        same = len(weights) == len(seen) and all(
            weight is before and write_count(weight) == tuple(numbers)
            for weight, (before, *numbers) in zip(weights, seen, strict=True)
        )
        if not same:
            self._seen = [(weakref.ref(weight), *write_count(weight)) for weight in weights]
            self._version = object()
        return self._version
