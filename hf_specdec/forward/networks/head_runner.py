"""The side of one call of a head that reads pairs: every row's requests answered by one forward a level of the trees.

Each step feeds the pairs of the tokens that were accepted, with the target's own states, and forgets the drafted
columns, which were computed from the head's. A head of several stages computes each level of a tree with another one.
"""

from collections.abc import Sequence

import torch

from hf_specdec.common.tree import DraftTree
from hf_specdec.forward.networks.head_base import BaseHeadRunner, HeadCall
from hf_specdec.forward.networks.head_stage import HeadStage, Wanted
from hf_specdec.methods.common.draft_head import PairHead

CHUNK = 512  # pairs of a prompt that are fed at once


class HeadRunner(BaseHeadRunner[PairHead]):
    """A head that reads pairs, with the texts of all rows."""

    def __init__(self, head: PairHead, call: HeadCall) -> None:
        super().__init__(head, call)
        following: HeadStage | None = None
        self._stages: list[HeadStage] = []
        for index in reversed(range(head.num_stages)):
            stage = HeadStage(
                head,
                index,
                self.texts,
                self._embeddings,
                reserve=call.reserve,
                following=following,
                shapes=call.shapes,
            )
            self._stages.insert(0, stage)
            following = stage

    def read(self, place: int, states: Sequence[torch.Tensor]) -> None:
        """See `BaseHeadRunner.read`."""
        features = self._features(place, states)
        self._stages[0].rows[place].read(features, len(self.texts[place]) - len(features))

    def num_unread(self, place: int) -> int:
        """Pairs of a row's text whose states are here and that are not in the cache."""
        return self._stages[0].rows[place].num_pending

    def _score(self, trees: Sequence[DraftTree | None]) -> torch.Tensor:
        known = list(self._num_scored)
        while (wave := self._wave(trees)) is not None:
            self._compute(wave, trees)
        new = [
            (place, node, self._stage_of(tree, node))
            for place, (tree, count) in enumerate(zip(trees, known, strict=True))
            if tree is not None
            for node in range(count, len(tree))
        ]
        if self.compiled is not None:
            return torch.stack([self._stages[stage].rows[place].logits[node] for place, node, stage in new])
        states = torch.stack([self._stages[stage].rows[place].states[node] for place, node, stage in new])
        return self.head.logits(states)

    def close(self) -> None:
        """The call has ended; buffers of compiled forwards are kept for the next one."""
        for stage in self._stages:
            stage.release()

    def _renew_round(self) -> None:
        for stage in self._stages:
            stage.commit()

    def _select(self, rows: Sequence[int]) -> None:
        for stage in self._stages:
            stage.select(rows)

    def _admit(self, other: "HeadRunner", place: int | None) -> None:
        for stage, joining in zip(self._stages, other._stages, strict=True):  # noqa: SLF001 another of the same class
            stage.admit(joining, place)

    def _wave(self, trees: Sequence[DraftTree | None]) -> list[range] | None:
        """For each row the nodes that can be computed now, those whose parents are; `None` where nothing is left."""
        wave = [self._next_nodes(known, tree) for known, tree in zip(self._num_scored, trees, strict=True)]
        return wave if any(wave) else None

    def _compute(self, wave: Sequence[range], trees: Sequence[DraftTree | None]) -> None:
        """Roots, or nodes below computed ones; a forward for each stage that has any."""
        for index, stage in enumerate(self._stages):
            wanted: list[Wanted | None] = [None] * len(wave)
            for place, (nodes, tree) in enumerate(zip(wave, trees, strict=True)):
                if tree is not None and (own := [node for node in nodes if self._stage_of(tree, node) == index]):
                    wanted[place] = self._wanted(index, place, tree, own)
            if any(wanted):
                stage.catch_up(CHUNK, wanted)
                stage.compute(wanted)
        self._num_scored = [max(known, nodes.stop) for known, nodes in zip(self._num_scored, wave, strict=True)]

    def _wanted(self, index: int, place: int, tree: DraftTree, own: Sequence[int]) -> Wanted:
        """Nodes for a stage, and those on their paths that it has not computed yet, with their inputs.

        At the beginning of a text a later stage has no state of the root, so that the path begins below it.
        """
        stage, nodes = self._stages[index].rows[place], set()
        for node in own:
            while node and node not in stage.states and node not in nodes:
                nodes.add(node)
                node = tree.parents[node]
        wanted, inputs = [], []
        for node in sorted(nodes):
            before = index - 1 if tree.depths[node] <= index else index
            state = self._stages[before].rows[place].states.get(tree.parents[node])
            if state is not None:
                wanted.append(node)
                inputs.append(state)
        return Wanted(tree, wanted, inputs)

    def _stage_of(self, tree: DraftTree, node: int) -> int:
        return min(tree.depths[node], len(self._stages) - 1)
