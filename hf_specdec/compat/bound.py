"""Replacement of a model's method in its `__dict__`, without keeping the model alive."""

import weakref
from typing import Any

from transformers import PreTrainedModel


class BoundToModel:
    """Bound to one model; a deep copy or a pickle of the model has one that is bound to the copy."""

    def __init__(self, model: PreTrainedModel) -> None:
        self._reference = weakref.ref(model)

    @property
    def model(self) -> PreTrainedModel:
        """The model.

        Raises:
            ReferenceError: it is gone.
        """
        model = self._reference()
        if model is None:
            raise ReferenceError(
                "The model of this method is gone, since nothing refers to it. Keep it in a variable while you use it: "
                "model = AutoModelForCausalLM.from_pretrained(path); model.generate(...). Enable a copy made part by "
                "part: hf_specdec.enable(model)."
            )
        return model

    def is_bound_to(self, model: PreTrainedModel) -> bool:
        """Returns whether it is that model's; the one that a shallow copy was made of may be gone."""
        return self._reference() is model

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_reference": self.model}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._reference = weakref.ref(state["_reference"])
