"""Graphs of torch's compiler with the arguments of one call, in which later calls replace what they are given.

Names              Why
`__compiled_fn`    begins the name of a graph in the code that torch makes of a function
"""

import operator
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from transformers.utils import ModelOutput

GRAPH_NAME = "__compiled_fn"
Make = Callable[[Sequence[Any]], Any]


def graph_name(names: Iterable[str]) -> str | None:
    """The name of the only graph among the global names of a function's code."""
    graphs = [name for name in names if name.startswith(GRAPH_NAME)]
    return graphs[0] if len(graphs) == 1 else None


def attributes_of(holders: Iterable[object]) -> list[Any]:
    """List what attributes of these objects and their dictionaries hold, to be compared by identity.

    Other threads may add and remove some meanwhile: each dictionary is copied before anything is looked at.
    """
    values = [value for holder in holders for value in list(vars(holder).values())]
    return values + [item for value in values if isinstance(value, dict) for item in list(value.values())]


class GraphWatch:
    """Runs a graph and remembers its last call."""

    def __init__(self, graph: Callable[..., Any]) -> None:
        self.graph = graph
        self.arguments, self.outputs = tuple[Any, ...](), tuple[Any, ...]()

    def __call__(self, *arguments: Any) -> Any:
        """Runs the graph."""
        self.arguments = arguments
        outputs = self.outputs = self.graph(*arguments)
        return outputs

    def bound(self, inputs: Mapping[str, Any], result: Any) -> Callable[..., Any] | None:
        """A function of tensors in the place of those among `inputs`: runs the graph on them and what else it got.

        `None` where `result` holds something that is neither the graph's nor an argument.

        Args:
            inputs: arguments of the function that ran the graph.
            result: of that function.
        """
        make = _maker(result, self.outputs, {id(value) for value in inputs.values()})
        if make is None:
            return None
        places = {id(tensor): place for place, tensor in enumerate(_tensors(inputs))}
        replaced = [(place, places[id(tensor)]) for place, tensor in enumerate(self.arguments) if id(tensor) in places]
        kept, graph = list(self.arguments), self.graph
        for place, _ in replaced:
            kept[place] = None  # a tensor of this step

        def call(**inputs: Any) -> Any:
            arguments, tensors = kept.copy(), list(_tensors(inputs))
            for place, number in replaced:
                arguments[place] = tensors[number]
            return make(graph(*arguments))

        return call


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    """The tensors among arguments and in mappings and sequences there."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from _tensors(item)
    elif isinstance(value, tuple | list):
        for item in value:
            yield from _tensors(item)


def _maker(value: Any, outputs: Sequence[Any], kept: set[int]) -> Make | None:
    """Makes the like of `value` of other outputs of the graph, the objects in `kept` staying as they are."""
    if isinstance(value, torch.Tensor):
        place = next((place for place, output in enumerate(outputs) if output is value), None)
        return None if place is None else operator.itemgetter(place)
    if value is None or (id(value) in kept and not isinstance(value, Mapping | tuple | list)):
        return lambda _: value
    if isinstance(value, ModelOutput):
        named = {name: _maker(item, outputs, kept) for name, item in value.items()}
        if None in named.values():
            return None
        kind = type(value)
        return lambda results: kind(**{name: make(results) for name, make in named.items() if make})
    if type(value) is tuple:
        makers = [make for item in value if (make := _maker(item, outputs, kept)) is not None]
        return (lambda results: tuple([make(results) for make in makers])) if len(makers) == len(value) else None
    return None
