"""Counts the torch operations of decoding steps and how often the host reads from a device.

Every operation outside the model's forward is a launch on a GPU, every read a stop. On a CPU the same calls are
counted; they are the same on a GPU but for what `hf_specdec.common.transfer.is_host` decides.
"""

import itertools
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any, NamedTuple

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import PreTrainedModel

READERS = {torch.Tensor.cpu, torch.Tensor.tolist}  # what reads without `_local_scalar_dense`, as `item()` does
VIEWS = frozenset(
    "alias detach diagonal expand lift_fresh permute select slice split squeeze transpose unbind unsqueeze view".split()
)


class StepOperations(NamedTuple):
    """One step's counts.

    Attributes:
        outside (`int`): operations outside the models' forwards, views left out: they launch nothing.
        views (`int`): views outside the forwards.
        inside (`int`): operations inside the target's forward, views among them.
        reads (`int`): reads of a tensor by the host, outside the forwards.
        drafts (`int`): operations inside the draft models' forwards, views among them.
        num_tokens (`int`): tokens that the step added, where an observer tells.
    """

    outside: int
    views: int
    inside: int
    reads: int
    drafts: int
    num_tokens: int = 0


class OperationCounter:
    """Counts while it is entered, for one target and its draft models; not shared between threads."""

    def __init__(self, model: PreTrainedModel, *drafts: PreTrainedModel) -> None:
        self.model, self.drafts = model, drafts
        self.steps: list[StepOperations] = []
        self._counts = Counter[str]()
        self._at_last_step = Counter[str]()
        self._at_forwards: list[Counter[str]] = []  # what was counted before each forward
        self._depths = {"inside": 0, "drafts": 0}
        self._entered = ExitStack()

    def __enter__(self) -> "OperationCounter":
        """Start counting."""
        for model, where in [(self.model, "inside"), *((draft, "drafts") for draft in self.drafts)]:
            begins, ends = self._forward_hook(where, 1), self._forward_hook(where, -1)
            self._entered.enter_context(model.register_forward_pre_hook(begins))
            last = model.get_output_embeddings() if where == "inside" else model  # a hook there leaves drafts
            self._entered.enter_context(last.register_forward_hook(ends, always_call=True))
        self._entered.enter_context(_Dispatched(self._count))
        self._entered.enter_context(_Called(self._count_read))
        return self

    def __exit__(self, *error: Any) -> None:
        """Stop counting."""
        self._entered.__exit__(*error)

    def end_step(self, step: Any) -> None:
        """A `spec_observer`: what was counted since the last one is a step's."""
        result = _between(self._at_last_step, self._counts)
        self.steps.append(result._replace(num_tokens=len(step.accepted)))
        self._at_last_step = self._counts.copy()

    def between_forwards(self) -> list[StepOperations]:
        """Counts from each forward's beginning to the next one's; for plain generation, too."""
        return [_between(earlier, later) for earlier, later in itertools.pairwise(self._at_forwards)]

    def _forward_hook(self, where: str, change: int) -> Callable[..., None]:
        def hook(*_: Any) -> None:
            if where == "inside" and not self._depths[where]:
                self._at_forwards.append(self._counts.copy())
            self._depths[where] += change

        return hook

    def _count(self, name: str) -> None:
        where = next((where for where, depth in self._depths.items() if depth), None)
        self._counts[where or ("views" if name in VIEWS else "outside")] += 1
        if name == "_local_scalar_dense":
            self._count_read()

    def _count_read(self) -> None:
        self._counts["reads"] += not any(self._depths.values())


def _between(earlier: Counter[str], later: Counter[str]) -> StepOperations:
    names = ("outside", "views", "inside", "reads", "drafts")
    return StepOperations(*(later[name] - earlier[name] for name in names))


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
