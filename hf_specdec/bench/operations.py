"""Counts the torch operations of decoding steps and how often the host reads from a device.

Every operation outside the model's forward is a launch on a GPU, every read a stop. On a CPU the same calls are
counted; they are the same on a GPU but for what `hf_specdec.transfer.is_host` decides.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import PreTrainedModel

__all__ = ["OperationCounter", "StepOperations"]

Counts = tuple[int, int, int, int, int]
READERS = {torch.Tensor.cpu, torch.Tensor.tolist}  # what reads without `_local_scalar_dense`, as `item()` does
VIEWS = frozenset(
    "alias detach diagonal expand lift_fresh permute select slice split squeeze transpose unbind unsqueeze view".split()
)


@dataclass(frozen=True, slots=True)
class StepOperations:
    """One step's counts.

    Attributes:
        outside (`int`): operations outside the models' forwards, views left out: they launch nothing.
        views (`int`): views outside the forwards.
        inside (`int`): operations inside the target's forward, views among them.
        reads (`int`): reads of a tensor by the host, outside the forwards.
        drafts (`int`): operations inside the draft models' forwards, views among them.
        num_tokens (`int`): tokens that the step added.
    """

    outside: int
    views: int
    inside: int
    reads: int
    drafts: int
    num_tokens: int


class OperationCounter:
    """Counts while it is entered, for one target and its draft models; not shared between threads."""

    def __init__(self, model: PreTrainedModel, *drafts: PreTrainedModel) -> None:
        self.model, self.drafts = model, drafts
        self.steps: list[StepOperations] = []
        self._outside = self._views = self._inside = self._reads = self._in_drafts = 0
        self._depth = self._draft_depth = 0
        self._ended: Counts = (0, 0, 0, 0, 0)
        self._modes: tuple[Any, ...] = ()
        self._hooks: list[Any] = []
        self._marks: list[Counts] = []  # what was counted before each forward

    def __enter__(self) -> "OperationCounter":
        """Start counting."""
        self._hooks = [
            self.model.register_forward_pre_hook(lambda *_: self._enter_forward(1)),
            self.model.register_forward_hook(lambda *_: self._enter_forward(-1), always_call=True),
        ]
        for draft in self.drafts:
            self._hooks.append(draft.register_forward_pre_hook(lambda *_: self._enter_draft(1)))
            self._hooks.append(draft.register_forward_hook(lambda *_: self._enter_draft(-1), always_call=True))
        modes: tuple[Any, ...] = (_Dispatched(self._count), _Called(self._count_read))
        self._modes = modes
        for mode in modes:
            mode.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        """Stop counting."""
        for mode in reversed(self._modes):
            mode.__exit__(*error)
        for hook in self._hooks:
            hook.remove()

    def end_step(self, step: Any) -> None:
        """A `spec_observer`: what was counted since the last one is a step's."""
        now = self._counts()
        self.steps.append(StepOperations(*_difference(now, self._ended), len(step.accepted)))
        self._ended = now

    def between_forwards(self) -> list[StepOperations]:
        """What was counted from each forward's beginning to the next one's; for plain generation, too."""
        return [
            StepOperations(*_difference(later, earlier), 0)
            for earlier, later in zip(self._marks, self._marks[1:], strict=False)
        ]

    def _counts(self) -> Counts:
        return self._outside, self._views, self._inside, self._reads, self._in_drafts

    def _enter_forward(self, change: int) -> None:
        if self._depth == 0:
            self._marks.append(self._counts())
        self._depth += change

    def _enter_draft(self, change: int) -> None:
        self._draft_depth += change

    def _count(self, name: str) -> None:
        if self._depth:
            self._inside += 1
        elif self._draft_depth:
            self._in_drafts += 1
        elif name in VIEWS:
            self._views += 1
        else:
            self._outside += 1
            self._reads += name == "_local_scalar_dense"

    def _count_read(self) -> None:
        self._reads += not (self._depth or self._draft_depth)


def _difference(later: Counts, earlier: Counts) -> Counts:
    outside, views, inside, reads, drafts = (after - before for after, before in zip(later, earlier, strict=True))
    return outside, views, inside, reads, drafts


class _Dispatched(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Tells of each operation of ATen's."""

    def __init__(self, tell: Callable[[str], None]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.tell = tell

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.tell(function.overloadpacket.__name__)
        return function(*args, **(kwargs or {}))


class _Called(TorchFunctionMode):
    """Tells of each call that reads whole tensors."""

    def __init__(self, tell: Callable[[], None]) -> None:
        super().__init__()
        self.tell = tell

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function in READERS:
            self.tell()
        return function(*args, **(kwargs or {}))
