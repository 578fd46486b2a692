"""Functions in the place of modules' forwards, for the length of a block and in the thread that enters it.

Everything that this package puts into a model's modules goes in and out here:

    with replaced([Kept(model.base_model)], states=[]):  # `Kept`, a `Replacement`, reads `this_thread.states`
        model(**inputs)

`this_thread` has what the forwards of this thread are to do. In another thread its values are the defaults, by which
a replacement calls the forward that it is in the place of: there, modules compute as they are.
"""

import contextlib
import threading
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Protocol, Self

import torch

_lock = threading.Lock()


class Recorder(Protocol):
    """Takes notes of one forward: kernels report what they compute."""

    def core(self, name: str, tensors: tuple[torch.Tensor | None, ...], numbers: Mapping[str, Any]) -> None:
        """The core has computed `name` of tensors and numbers; the last tensor holds the result."""

    def call(
        self, function: Callable[..., torch.Tensor], args: tuple[Any, ...], kwargs: dict[str, Any], result: torch.Tensor
    ) -> None:
        """A function of tensors is computed as a whole, whatever torch calls inside."""

    def update(self, layer: int, states: tuple[torch.Tensor, ...], columns: tuple[torch.Tensor, ...]) -> None:
        """Keys and values have been written into a layer of the cache, which returns `columns`."""

    def states(
        self,
        layer: Any,
        function: Callable[..., torch.Tensor],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        result: torch.Tensor,
    ) -> None:
        """A function of a layer of the cache, which continues its states, and of tensors is computed as a whole.

        A result that is the layer's `joined` has a size that no record has: only such functions read it.
        """

    def paused(self) -> contextlib.AbstractContextManager[None]:
        """A block of which nothing is noted."""


class ThreadValues(threading.local):
    """Values of this thread's forwards.

    Attributes:
        depth (`int`): open blocks whose layers the compiled core may compute.
        attends (`bool`): whether attention takes the faster ways.
        has_core (`bool`): whether the core is one of them.
        counting: counts who computes attention, as of `kernels.layers.counted`.
        packed: `PackedRows` of the queries.
        recorded: the cache that records states of layers.
        recorder (`Recorder | None`): takes notes of the forward.
        states (`list[Tensor] | None`): gets the last hidden states.
    """

    depth = 0
    attends = False
    has_core = False
    counting: Any = None
    packed: Any = None
    recorded: Any = None
    recorder: Recorder | None = None
    states: list[torch.Tensor] | None = None


this_thread = ThreadValues()


class Replacement:
    """Callable in the place of a module's `forward` while a block is open in any thread.

    Subclasses define `__call__`, which calls `original` where `this_thread` says nothing of the block. Two threads
    share the first one of a class that is put on a module, so it keeps nothing of a call.

    Attributes:
        before: a forward that the module had before, as under accelerate's hooks; `None` for that of its class.
        users (`int`): open blocks.
    """

    __slots__ = ("before", "module", "users")

    def __init__(self, module: torch.nn.Module) -> None:
        self.module, self.before, self.users = module, None, 0

    def original(self, *args: Any, **kwargs: Any) -> Any:
        """Calls the forward that the module has outside of blocks."""
        if self.before is not None:
            return self.before(*args, **kwargs)
        return type(self.module).forward(self.module, *args, **kwargs)

    @property
    def __wrapped__(self) -> Any:
        """The forward whose signature transformers reads."""
        return self.before or type(self.module).forward.__get__(self.module)

    def __getstate__(self) -> tuple[None, dict[str, Any]]:
        """A copy of the module is in no block; the next one that opens takes this out of it again."""
        names = [name for cls in type(self).__mro__ for name in getattr(cls, "__slots__", ())]
        return None, {name: 0 if name == "users" else getattr(self, name) for name in names}


class replaced:
    """A block in which replacements are on their modules, and `this_thread` has other values.

    A module that has a replacement of another class already, or a forward of its own that a replacement does not wrap,
    keeps it. Whatever interrupts the block, what is left on modules does nothing.

    Args:
        replacements: one for each module.
        wraps: whether forwards that modules have of their own are wrapped.
        values: of `this_thread`.
    """

    def __init__(self, replacements: Iterable[Replacement] = (), *, wraps: bool = False, **values: Any) -> None:
        self._replacements, self._wraps, self._values = replacements, wraps, values
        self._before: dict[str, Any] = {}
        self._installed: list[Replacement] = []

    def __enter__(self) -> Self:
        with _lock:
            for replacement in self._replacements:
                attributes = vars(replacement.module)
                installed = attributes.setdefault("forward", replacement)
                if self._wraps and not isinstance(installed, Replacement):
                    replacement.before = installed
                    installed = attributes["forward"] = replacement
                if type(installed) is type(replacement):  # this one, or that of another thread
                    installed.users += 1
                    self._installed.append(installed)
        self._before = {name: getattr(this_thread, name) for name in self._values}
        vars(this_thread).update(self._values)
        return self

    def __exit__(self, *_: object) -> None:
        vars(this_thread).update(self._before)
        with _lock:
            for installed in self._installed:
                installed.users -= 1
                attributes = vars(installed.module)
                if not installed.users and attributes.get("forward") is installed:
                    if installed.before is None:
                        del attributes["forward"]
                    else:
                        attributes["forward"] = installed.before
            self._installed.clear()
