"""Facts that follow from a model's structure alone, found once for all calls."""

from collections.abc import Callable
from typing import Any, Concatenate, ParamSpec, TypeVar, cast

from transformers import PreTrainedModel

STATE_ATTRIBUTE = "_hf_specdec"  # of a model: its facts are a part of the state that the engine keeps there

Arguments = ParamSpec("Arguments")
Fact = TypeVar("Fact")


class ModelFacts:
    """Facts of one model, valid as long as its modules, their classes and its configuration stay as they are.

    Safe to share between threads; a copy knows nothing.
    """

    def __init__(self) -> None:
        self._known: dict[tuple[Any, ...], Any] = {}

    def of(
        self,
        find: Callable[Concatenate[PreTrainedModel, Arguments], Fact],
        model: PreTrainedModel,
        *args: Arguments.args,
        **kwargs: Arguments.kwargs,
    ) -> Fact:
        """`find(model, *args)`, at first.

        Args:
            find: goes by nothing but what `Fingerprint.structure` covers; what it returns is never changed and does not
                hold the model.
        """
        key = (find, *args, *kwargs.items())
        if key not in self._known:
            self._known[key] = find(model, *args, **kwargs)
        return cast("Fact", self._known[key])

    def __reduce__(self) -> tuple[type["ModelFacts"], tuple[()]]:
        return ModelFacts, ()
