"""Compiled functions whose guards held once in a call, which go without them for the rest of it.

Guards compare some thousand attributes of the model with what was compiled.
"""

from collections.abc import Callable, Hashable, Iterable, Mapping
from typing import Any

import torch

from hf_specdec.cache.static_cache import FixedShapes
from hf_specdec.compat import compiling

Step = Callable[..., tuple[Any, torch.Tensor]]


class CheckedSteps:
    """Compiled steps of one call in which no other code runs between the forwards."""

    def __init__(self) -> None:
        self._steps: dict[Hashable, Step] = {}  # what to run for arguments of a form, with the same objects among them

    def run(
        self,
        step: Step,
        shape: tuple[int, ...],
        inputs: Mapping[str, Any],
        holders: Callable[[], Iterable[object]],
    ) -> tuple[Any, torch.Tensor]:
        """Calls the function, without its guards where they held for such arguments before.

        Args:
            step: of `compat.compiled`, with a graph for these arguments unless the model has changed.
            shape: what else the form consists of.
            holders: as of `Unguarded.bind`.
        """
        objects: list[int] = []
        form = (shape, _form(inputs, objects), tuple(objects))
        if form in self._steps:
            return self._steps[form](**inputs)
        result: tuple[Any, torch.Tensor]
        if (direct := compiling.without_guards(step, inputs)) is not None:
            result, bound = direct.bind(inputs, holders)
        else:  # torch compiles it again, or runs it in parts that have guards of their own
            result, bound = step(**inputs), None
            direct = compiling.without_guards(step, inputs)
        self._steps[form] = bound or direct or step
        return result


def checked_steps(fixed: FixedShapes | None) -> CheckedSteps | None:
    """For the forwards of one call; `None` where each checks its guards."""
    return CheckedSteps() if fixed is not None and fixed.is_undisturbed else None


def _form(value: Any, objects: list[int]) -> Hashable:
    """Equal for arguments between which torch's guards see no difference, but for the objects among them.

    Args:
        objects: gets the identity of each of these.
    """
    if isinstance(value, torch.Tensor):
        return tuple(value.shape), value.stride(), value.dtype, value.device
    if isinstance(value, Mapping):
        return tuple((name, _form(item, objects)) for name, item in value.items())
    if isinstance(value, (tuple, list)):
        return tuple(_form(item, objects) for item in value)
    if isinstance(value, (bool, int, float, str, torch.dtype)):
        return type(value), value
    objects.append(id(value))
    return f"{type(value).__module__}.{type(value).__qualname__}"
