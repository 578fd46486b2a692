"""A step that is interrupted commits what was chosen before."""

from collections.abc import Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from hf_specdec.common.stats import SpecStats
from hf_specdec.common.tree import DraftTree
from hf_specdec.engine.step import StepRunner
from hf_specdec.engine.verify import VerifyResult


class Interrupted(Sequence[DraftTree]):
    """Trees of so many sequences, then Ctrl-C."""

    def __init__(self, trees: list[DraftTree], at: int) -> None:
        self.trees, self.at = trees, at

    def __len__(self) -> int:
        return len(self.trees)

    def __getitem__(self, place: Any) -> Any:
        return self.trees[place]

    def __iter__(self) -> Iterator[DraftTree]:
        yield from self.trees[: self.at]
        raise KeyboardInterrupt


@pytest.mark.parametrize("at", [0, 1, 2])
def test_an_interrupt_between_two_sequences_commits_the_results_so_far(at: int) -> None:
    """That of the last one too: then there is none that was interrupted."""
    committed: list[list[list[int]]] = []
    sequences = [
        SimpleNamespace(finished=False, visited=[0], verify=lambda tree, on_token: VerifyResult([7, 8], [0, 1]))
        for _ in range(2)
    ]
    batch: Any = SimpleNamespace(sequences=sequences, target=SimpleNamespace(commit=committed.append))
    steps = StepRunner(SpecStats(method="plain", tier="tree"), budget=None, observer=None)
    trees = Interrupted([DraftTree.chain(5, [7])] * 2, at)
    with pytest.raises(KeyboardInterrupt):
        steps._verify(batch, trees)
    (paths,) = committed
    assert paths == [[0, 1]] * at + [[0]] * (2 - at)
