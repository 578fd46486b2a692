"""Heads over buffers of fixed shape: the logits of the forwards without them, and a graph for each width."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from hf_specdec.cache.static_cache import FixedShapes
from hf_specdec.common.tree import DraftTree, TreeBuilder
from hf_specdec.compat import compiling
from hf_specdec.engine.static_shapes import forward_widths
from hf_specdec.forward.compiled_forward import CompiledForward, CompiledShapes
from hf_specdec.forward.networks.block_runner import BLOCK_STEP, BlockRunner
from hf_specdec.forward.networks.head_base import HeadCall
from hf_specdec.forward.networks.head_runner import HeadRunner
from hf_specdec.forward.networks.head_stage import PAIR_STEP
from hf_specdec.methods.common.draft_head import BlockHead
from tests.helpers.graphs import LendingCompiler, Recorder
from tests.helpers.heads import CASES, Zoo
from tests.helpers.zoo import VOCAB_SIZE

NAMES = ("eagle3, two layers", "eagle3, sliding", "mtp, glm4_moe, 3 layers", "dflash, gemma3")
WIDEST, CAPACITY = 6, 128  # DFlash's block is as long


class Both:
    """A head as it is written and one over buffers of fixed shape, with the same texts."""

    def __init__(self, zoo: Zoo, name: str, prompts: Sequence[Sequence[int]], compiled: Any = None) -> None:
        target = CASES[name].target(zoo)
        head: Any = CASES[name].head(target)
        config = target.config.get_text_config()
        self.width, layers = config.hidden_size, head.layer_ids(config.num_hidden_layers)
        call = HeadCall(
            prompts=prompts,
            embed=target.get_input_embeddings(),
            hidden_layers=layers,
            vocab_size=VOCAB_SIZE,
            relative_cost=0.1,
            device=torch.device("cpu"),
        )
        is_block = isinstance(head, BlockHead)
        self.compiled = compiled or CompiledForward(head, {}, BLOCK_STEP if is_block else PAIR_STEP)
        shapes = CompiledShapes(FixedShapes(forward_widths(WIDEST, on_host=True), CAPACITY), self.compiled)
        calls = (call, dataclasses.replace(call, shapes=shapes))
        self.runners: list[Any] = [
            BlockRunner(head, call, target.get_output_embeddings()) if is_block else HeadRunner(head, call)
            for call in calls
        ]
        self.generator = torch.Generator().manual_seed(3)
        for place, prompt in enumerate(prompts):
            self.go_on(place, [7], num_states=len(prompt))

    def go_on(self, place: int, accepted: Sequence[int], num_states: int | None = None) -> None:
        """A step of the target has accepted tokens."""
        count = len(accepted) if num_states is None else num_states
        states = [torch.randn(count, self.width, generator=self.generator) for _ in self.runners[0].hidden_layers]
        for runner in self.runners:
            runner.read(place, states)
            runner.keep(place, accepted)

    def assert_alike(self, trees: Sequence[DraftTree | None]) -> None:
        """Both give the same logits."""
        expected, ours = (runner.score(trees) for runner in self.runners)
        for item, other in zip(expected, ours, strict=True):
            torch.testing.assert_close(other.logits, item.logits, atol=2e-4, rtol=2e-4)

    def root(self, place: int) -> int:
        """The last token of a text."""
        return self.runners[0].texts[place][-1]


def tree_of(root: int, children: Sequence[tuple[int, int]] = ((0, 4), (0, 5), (0, 6), (1, 8), (2, 9))) -> DraftTree:
    """Of parents and tokens; two levels, where nothing is said."""
    builder = TreeBuilder(root)
    for parent, token in children:
        builder.add(parent, token)
    return builder.build()


@pytest.mark.parametrize("name", NAMES)
def test_logits_are_those_of_forwards_as_they_are_written(zoo: Zoo, recorder: Recorder, name: str) -> None:
    """Two rows, steps that accept any number of tokens, rows that are not asked for a while, chains and trees."""
    both = Both(zoo, name, [[1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11], [3, 4]])
    for count in (1, 3, 6, 2, 11, 1, 5, 4):
        roots = [DraftTree.chain(both.root(place)) for place in range(2)]
        both.assert_alike(roots)
        both.assert_alike([DraftTree.chain(both.root(0), [4]), tree_of(both.root(1))])
        both.assert_alike([DraftTree.chain(both.root(0), [4, 2, 8]), None])
        for place in range(2):
            both.go_on(place, [4, 2, 8, 3, 9, 1, 5, 6, 7, 11, 12][: count + place])
    both.go_on(0, [5] * 20)  # more than one forward has room for
    both.assert_alike([DraftTree.chain(both.root(0)), None])
    assert all(len(kinds) == 1 for kinds in recorder.kinds)
    stages = {shape[3:] for shape in both.compiled.shapes}
    assert 0 < recorder.num_graphs == both.compiled.num_graphs <= 2 * len(stages) < len(both.compiled.shapes)
    assert {shape[1] for shape in both.compiled.shapes} <= set(forward_widths(WIDEST, on_host=True))
    assert {shape[2] for shape in both.compiled.shapes} == {CAPACITY}


@pytest.mark.at_most(2)
@pytest.mark.parametrize("name", NAMES)
def test_a_later_call_has_the_graphs_and_the_buffers_of_the_first(zoo: Zoo, recorder: Recorder, name: str) -> None:
    """And nothing of its text."""
    compiled, numbers = None, []
    for prompt in ([1, 2, 3, 4, 5, 6, 7, 8, 9], [9, 8], list(range(1, 40)), list(range(1, 12))):
        both = Both(zoo, name, [prompt, prompt[:2]], compiled)
        for _ in range(3):
            both.assert_alike([tree_of(both.root(0)), DraftTree.chain(both.root(1), [4, 3])])
            both.go_on(0, [4, 8])
            both.go_on(1, [2])
        for runner in both.runners:
            runner.close()
        compiled = both.compiled
        numbers.append(recorder.num_graphs)
    assert 0 < numbers[0] <= numbers[-1] == numbers[-2]
    assert all(len(kinds) == 1 for kinds in recorder.kinds)


@pytest.mark.parametrize("name", NAMES)
def test_rows_leave_the_batch(zoo: Zoo, recorder: Recorder, name: str) -> None:
    both = Both(zoo, name, [[1, 2, 3], [3, 4, 5, 6, 7, 8, 9, 10, 12], [5, 5]])
    both.assert_alike([DraftTree.chain(both.root(place), [3]) for place in range(3)])
    for place in range(3):
        both.go_on(place, [3, 9])
    for runner in both.runners:
        runner.select([1, 2])
    for _ in range(2):
        both.assert_alike([tree_of(both.root(place)) for place in range(2)])
        for place in range(2):
            both.go_on(place, [4, 8])
    assert all(len(kinds) == 1 for kinds in recorder.kinds)
    assert min(shape[0] for shape in both.compiled.shapes) == 2


def test_a_round_that_outgrows_the_buffers_has_longer_ones(zoo: Zoo, recorder: Recorder) -> None:
    """And a request of more nodes than any width runs as it is written."""
    both = Both(zoo, NAMES[0], [list(range(1, CAPACITY - 2))])
    for number in range(1, 4):
        both.assert_alike([DraftTree.chain(both.root(0), [4, 2, 8, 3, 9, 1][: 2 * number])])
    both.go_on(0, [4])
    both.assert_alike([DraftTree.chain(both.root(0))])
    both.assert_alike([tree_of(both.root(0), [(0, token) for token in range(WIDEST + 2)])])
    assert max(shape[2] for shape in both.compiled.shapes) > CAPACITY
    assert {shape[1] for shape in both.compiled.shapes} <= set(forward_widths(WIDEST, on_host=True))


@pytest.mark.parametrize("name", ["eagle3, two layers", "mtp, glm4_moe, 3 layers"])
def test_states_and_logits_outlive_later_graphs(zoo: Zoo, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """Of a node below one of an earlier request, and of levels of one request, where graphs write over outputs."""
    monkeypatch.setattr(compiling, "compiled", LendingCompiler())
    monkeypatch.setattr(CompiledForward, "is_lent", True)
    both = Both(zoo, name, [[1, 2, 3]])
    children = [(0, 4), (0, 5), (1, 6), (2, 7)]
    for count in (0, 2, 3, 4):
        both.assert_alike([tree_of(both.root(0), children[:count])])
    both.go_on(0, [5, 7])
    both.assert_alike([tree_of(both.root(0))])
