"""Counts the torch operations of decoding steps and how often the host reads from a device.

Every operation outside the model's forward is a launch on a GPU, every read a stop. On a CPU the same calls are
counted; they are the same on a GPU but for what `hf_specdec.common.transfer.is_host` decides.
"""

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
        outside (`int`): operations outside the model's forwards, views left out: they launch nothing.
        reads (`int`): reads of a tensor by the host, outside the forwards.
        num_tokens (`int`): tokens that the step added, where an observer tells.
    """

    outside: int
    reads: int
    num_tokens: int = 0


class OperationCounter:
    """Counts while it is entered, for one target; not shared between threads."""

    def __init__(self, model: PreTrainedModel) -> None:
        self.model = model
        self.steps: list[StepOperations] = []
        self._outside = self._reads = self._depth = 0
        self._entered = ExitStack()

    def __enter__(self) -> "OperationCounter":
        """Start counting."""
        self._entered.enter_context(self.model.register_forward_pre_hook(self._forward_hook(1)))
        last = self.model.get_output_embeddings()  # a hook there leaves drafts
        self._entered.enter_context(last.register_forward_hook(self._forward_hook(-1), always_call=True))
        self._entered.enter_context(_Dispatched(self._count))
        self._entered.enter_context(_Called(self._count_read))
        return self

    def __exit__(self, *error: Any) -> None:
        """Stop counting."""
        self._entered.__exit__(*error)

    def end_step(self, step: Any) -> None:
        """A `spec_observer`: what was counted since the last one is a step's."""
        self.steps.append(StepOperations(self._outside, self._reads, len(step.accepted)))
        self._outside = self._reads = 0

    def _forward_hook(self, change: int) -> Callable[..., None]:
        def hook(*_: Any) -> None:
            self._depth += change

        return hook

    def _count(self, name: str) -> None:
        self._outside += not self._depth and name not in VIEWS
        if name == "_local_scalar_dense":
            self._count_read()

    def _count_read(self) -> None:
        self._reads += not self._depth


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
