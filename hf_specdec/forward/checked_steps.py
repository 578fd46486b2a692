"""Compiled functions whose guards held once in a call, which go without them for the rest of it.

Guards compare some thousand attributes of the model with what was compiled.
"""

from collections.abc import Callable, Hashable, Iterable, Mapping
from dataclasses import dataclass, field
from types import CodeType
from typing import Any

import torch

from hf_specdec.cache.static_cache import FixedShapes
from hf_specdec.compat import compiling
from hf_specdec.forward.forward_arguments import KeptArguments

Step = Callable[..., tuple[Any, torch.Tensor]]
TakenForms = dict[Hashable, compiling.Unguarded]  # the graph that took arguments of a form; lives longer than a call
MOST_FORMS = 256


@dataclass(frozen=True, slots=True)
class CheckedSteps:
    """Compiled steps of one call in which no other code runs between the forwards.

    Attributes:
        steps: what to run for arguments of a form, with these objects among them.
        kept: what to run for arguments that are kept, by their identity.
        graphs: the code of graphs whose guards held, with these objects among the arguments.
    """

    steps: dict[Hashable, Step] = field(default_factory=dict)
    kept: dict[int, tuple[KeptArguments, Step]] = field(default_factory=dict)
    graphs: set[tuple[CodeType, Hashable]] = field(default_factory=set)

    def run(
        self,
        step: Step,
        shape: tuple[int, ...],
        inputs: Mapping[str, Any],
        taken: TakenForms,
        holders: Callable[[], Iterable[object]],
    ) -> tuple[Any, torch.Tensor]:
        """Calls the function.

        A graph whose guards held in this call for another form, and in an earlier call for this one, is not asked
        again: the first says that the model is the same, the second that the form is right.

        Args:
            step: of `compat.compiled`, with a graph for these arguments unless the model has changed.
            shape: what else the form consists of.
            taken: of earlier calls of this function; grows.
            holders: as of `Unguarded.bind`.
        """
        kept = self.kept.get(id(inputs))
        if kept is not None and kept[0] is inputs:
            return kept[1](**inputs)
        objects: list[int] = []
        form = (shape, _form(inputs, objects))
        alike = (form, tuple(objects))
        if alike in self.steps:
            if isinstance(inputs, KeptArguments):
                self.kept[id(inputs)] = inputs, self.steps[alike]
            return self.steps[alike](**inputs)
        result: tuple[Any, torch.Tensor]
        direct = taken.get(form)
        if direct is None or (direct.code, alike[1]) not in self.graphs:
            direct = compiling.without_guards(step, inputs)
        if direct is not None:
            result, bound = direct.bind(inputs, holders)
        else:  # torch compiles it again, or runs it in parts that have guards of their own
            result, bound = step(**inputs), None
            direct = compiling.without_guards(step, inputs)
        self.steps[alike] = bound or direct or step
        if direct is not None:
            if len(taken) >= MOST_FORMS:
                taken.clear()
            taken[form] = direct
            self.graphs.add((direct.code, alike[1]))
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
