"""Settings by which transformers compiles decoding, functions of torch's compiler, and its graphs bound to a call.

Names                              Why
`_valid_auto_compile_criteria`     when plain generate compiles a forward, by itself or when asked
`_default_compile_config`          how, where the caller says nothing
`torch._dynamo.utils.counters`     graphs that were made, of which `torch.compile` says nothing
`_torchdynamo_orig_callable`, `_debug_get_cache_entry_list`, `set_eval_frame`, `_stance`
                                   a function's code as it is compiled, to call it without its guards, as vLLM does
`reset_code`                       frees the graphs of a function that is gone, which torch keeps otherwise
`InstructionTranslator`            whose graph is being made while attention is traced
`__compiled_fn`                    begins the name of a graph in the code that torch makes of a function
"""

import inspect
import operator
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from types import CellType, CodeType, FunctionType
from typing import Any

import torch
from transformers import GenerationConfig, PreTrainedModel
from transformers.utils import ModelOutput

OWN_NAME = "hf_specdec_step"  # of the code that is compiled here


def compile_settings(
    model: PreTrainedModel, generation_config: GenerationConfig, model_kwargs: Mapping[str, Any]
) -> dict[str, Any] | None:
    """Arguments of `torch.compile` where plain generate would compile its steps; `None` where it would not.

    As there, `dynamic` is `None` unless the caller says otherwise: what changes is made dynamic when it changes.
    """
    if "llama4" in model.config.model_type:  # transformers' `get_compiled_call` leaves it out as well
        return None
    if not model._valid_auto_compile_criteria(dict(model_kwargs), generation_config):
        return None
    config = generation_config.compile_config or model._default_compile_config()
    settings: dict[str, Any] = config.to_dict()
    if settings.get("options") is not None:
        settings.pop("mode")  # torch takes one of them
    return settings


def compiled(function: Callable[..., Any], settings: Mapping[str, Any]) -> Callable[..., Any]:
    """The function, compiled at its first call, with graphs that other functions of the same code do not share."""
    step: Callable[..., Any] = torch.compile(_with_own_code(function), **settings)
    return step


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def is_traced_for_us() -> bool:
    """Asked while torch traces: whether the graph is that of a function of `compiled`.

    What follows a break in its graph is not: torch uses the graphs of such pieces in other functions too.
    """
    try:
        tracing = torch._dynamo.symbolic_convert.InstructionTranslator.current_tx()
    except AttributeError:  # `torch.export` traces by itself
        return False
    return bool(tracing.output.root_tx.f_code.co_name == OWN_NAME)


def _with_own_code(function: Any) -> FunctionType:
    """A copy of the function with a code object of its own, for which torch keeps and counts graphs."""
    copy = FunctionType(
        function.__code__.replace(co_name=OWN_NAME),
        function.__globals__,
        function.__name__,
        function.__defaults__,
        function.__closure__,
    )
    copy.__kwdefaults__ = function.__kwdefaults__
    if hasattr(torch._C._dynamo.eval_frame, "reset_code"):
        finalizer = weakref.finalize(copy, torch._C._dynamo.eval_frame.reset_code, copy.__code__)
        finalizer.atexit = False
    return copy


class Unguarded:
    """Compiled code of a function, called without its guards.

    Args:
        function: the function as it was written.
        code: what torch made of it, of some of its arguments.
        closure: the cells that this code reads.
    """

    def __init__(self, function: Any, code: CodeType, closure: tuple[CellType, ...]) -> None:
        self.code, self._function, self._closure = code, function, closure
        self._run = self._over(function.__globals__)
        self._graph_name = graph_name(code.co_names)
        self._assigns: bool | None = None  # whether it changes attributes, once that was looked at

    def __call__(self, **inputs: Any) -> Any:
        """Calls the function."""
        return _called(self._run, inputs)

    def bind(
        self, inputs: Mapping[str, Any], holders: Callable[[], Iterable[object]]
    ) -> tuple[Any, Callable[..., Any] | None]:
        """Calls the function; returns its result, and a faster way to call it with other tensors.

        Its code collects some ten attributes of every layer for its graph: 0.3 ms for 32 layers on one CPU thread. The
        faster way has them, as long as they stay the same objects. `None` where it changes attributes itself.

        Args:
            holders: finds the objects whose attributes it may change.
        """
        if self._graph_name is None or self._assigns:
            return self(**inputs), None
        variables = self._function.__globals__
        watch = GraphWatch(variables[self._graph_name])
        before = attributes_of(holders()) if self._assigns is None else []
        result = _called(self._over({**variables, self._graph_name: watch}), inputs)
        if self._assigns is None:
            after = attributes_of(holders())
            self._assigns = len(after) != len(before) or not all(map(operator.is_, after, before))
        return result, None if self._assigns else watch.bound(inputs, result)

    def _over(self, variables: dict[str, Any]) -> FunctionType:
        """Its code with these global variables."""
        function = self._function
        copy = FunctionType(self.code, variables, function.__name__, function.__defaults__, self._closure)
        copy.__kwdefaults__ = function.__kwdefaults__
        return copy


def _called(function: Callable[..., Any], inputs: Mapping[str, Any]) -> Any:
    """Calls code of torch's compiler, which is not to be compiled again."""
    prior = torch._C._dynamo.eval_frame.set_eval_frame(None)
    try:
        return function(**inputs)
    finally:
        torch._C._dynamo.eval_frame.set_eval_frame(prior)


def without_guards(function: Callable[..., Any], inputs: Mapping[str, Any]) -> Unguarded | None:
    """Compiled code for these keyword arguments, without its guards; `None` where it is not known.

    Guards compare every parameter and attribute that the function has read: 1.4 ms for 32 layers on one CPU thread.

    Args:
        function: of `compiled`, with keyword arguments alone.
    """
    try:
        original = function._torchdynamo_orig_callable  # type: ignore[attr-defined]
        cells = dict(zip(original.__code__.co_freevars, original.__closure__ or (), strict=True))
        arguments = inspect.signature(original).bind(**inputs).arguments
        seen = {name: cell.cell_contents for name, cell in cells.items()} | arguments
        entries = torch._dynamo.eval_frame._debug_get_cache_entry_list(original.__code__)
        code = next(entry.code for entry in entries if entry.guard_manager.check(seen))  # as torch chooses
        closure = tuple(cells[name] for name in code.co_freevars)
        is_asked = _stance() == "default"  # `torch.compiler.set_stance` may ask for none
    except (AttributeError, StopIteration, KeyError, TypeError, RuntimeError):
        return None
    if not is_asked or any("__resume" in name for name in code.co_names):  # what follows a break has its own guards
        return None
    return Unguarded(original, code, closure)


def forbids_compiling() -> bool:
    """True if the caller wants an error where something new would be compiled, as plain `generate` gives one."""
    return _stance() == "fail_on_recompile"


def _stance() -> str:
    """Current stance of `torch.compiler.set_stance`; empty where torch keeps it elsewhere."""
    return str(getattr(getattr(torch._dynamo.eval_frame, "_stance", None), "stance", ""))


def num_compiled() -> int:
    """Graphs that torch has made in this process."""
    return int(torch._dynamo.utils.counters["stats"]["unique_graphs"])


def mark_step_begin() -> None:
    """Marks outputs of earlier compiled forwards as free: CUDA graphs may overwrite them."""
    torch.compiler.cudagraph_mark_step_begin()  # type: ignore[no-untyped-call]


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
