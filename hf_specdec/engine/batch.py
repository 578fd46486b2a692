"""Sequences that are decoded together, with the target's and the draft model's side of them."""

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from hf_specdec.common.tree import DraftTree, ExtraTokens
from hf_specdec.engine.cost.budget import Budget
from hf_specdec.engine.sequence import SequenceState
from hf_specdec.forward.compiled_forward import CompiledForward
from hf_specdec.forward.model_runner import MAX_UNCACHED, ModelRunner
from hf_specdec.forward.networks.runner_base import BaseDraftRunner
from hf_specdec.forward.prompt import PromptStart
from hf_specdec.methods.common.draft_scorer import at_common_width
from hf_specdec.methods.common.drafter import DraftCost
from hf_specdec.methods.common.node_logits import LogitsRead, NodeLogits


@dataclass(slots=True)
class Batch:
    """Sequences decoded together; the one at place i is row i of the target and of `draft_runner`.

    Attributes:
        max_nodes (`int`): most drafted tokens of a sequence and step.
        max_positions (`int | None`): positions the model has; drafts never reach beyond them.
        vocab_size (`int | None`): tokens the model knows; drafted ids beyond them are left out.
        pad_token_id (`int`): follows sequences that end before others.
        draft_runner: what drafts with a network, a draft model or a head; `None` without one, and in
            processes that do not compute with it.
        rounds_alike (`bool`): as of `PromptStart`.
        prompt (`PromptStart`): reads the prompts.
    """

    sequences: list[SequenceState]
    target: ModelRunner
    max_nodes: int
    max_positions: int | None = None
    vocab_size: int | None = None
    pad_token_id: int = 0
    draft_runner: BaseDraftRunner | None = None
    rounds_alike: bool = False
    prompt: PromptStart = field(init=False)

    def __post_init__(self) -> None:
        self.prompt = PromptStart(self.target, rounds_alike=self.rounds_alike)

    @property
    def num_live(self) -> int:
        """Sequences that have not ended."""
        return sum(not sequence.finished for sequence in self.sequences)

    @property
    def noise_seconds(self) -> float:
        """Seconds that the random numbers of draws have taken on the host."""
        return sum(sequence.sampler.noise_seconds for sequence in self.sequences)

    def select(self, places: Sequence[int]) -> None:
        """Go on with the sequences at these places only."""
        self.target.select(places)
        if self.draft_runner is not None:
            self.draft_runner.select(places)
        self.sequences = [self.sequences[place] for place in places]

    def without_drafts(self, trees: Sequence[DraftTree]) -> list[DraftTree]:
        """Trees of a step whose sequences compute the next token alone."""
        return [DraftTree.chain(tree.tokens[0]) for tree in trees]

    def draft_cost(self, budget: Budget) -> DraftCost:
        """Expected tokens that the drafts of the weighed sequences have to gain."""
        live = [sequence for sequence in self.sequences if not sequence.finished]
        tokens_left = max((sequence.tokens_left for sequence in live), default=0)
        network = None if self.draft_runner is None else self.draft_runner.network
        return budget.draft_cost(len(self.sequences), len(live), tokens_left, network)

    def worthwhile(self, trees: Sequence[DraftTree], budget: Budget | None) -> list[DraftTree]:
        """The trees without what is not worth its time: by the budget, or by what their drafters ask for."""
        if budget is not None:
            return budget.cut(trees, self.num_live, packs=self.target.takes_packed_rows)
        bounds = [0.0 if sequence.finished else sequence.drafter.min_probability for sequence in self.sequences]
        return at_common_width(trees, bounds)

    def verifiable(self, tree: DraftTree, depth: int) -> DraftTree:
        """A proposed tree as far as the target can verify it."""
        if self.target.tier == "chain" and not (tree.is_chain and tree.extra is None):
            tree = tree.chained()
        if tree.extra is not None and not self.fits(tree.extra):
            tree = tree.with_extra(None)
        return tree.truncated(max_depth=depth, max_nodes=self.max_nodes, vocab_size=self.vocab_size)

    def admit(self, other: "Batch", place: int | None) -> None:
        """Take over the one sequence of `other`, whose prompt is read, in `place` or after the last."""
        self.target.admit(other.target, place)
        if self.draft_runner is not None and other.draft_runner is not None:
            self.draft_runner.admit(other.draft_runner, place)
        self.max_nodes = max(self.max_nodes, other.max_nodes)
        at = len(self.sequences) if place is None else place
        self.sequences[at : at + 1] = other.sequences

    def close(self, *left: SequenceState) -> None:
        """End the drafters, those of sequences that have `left` too, and free the caches, also where one raises."""
        with contextlib.ExitStack() as stack:  # in reverse
            for network in (self.draft_runner, self.target):
                if network is not None:
                    stack.callback(network.close)
            for sequence in (*reversed(self.sequences), *reversed(left)):
                stack.callback(sequence.end)

    def read(self, trees: Sequence[DraftTree]) -> list[NodeLogits]:
        """The last forward's logits, with one transfer of what samplers and drafters want of them."""
        counts = [count for sequence in self.sequences if (count := sequence.num_top_logits) is not None]
        for sequence, tree in zip(self.sequences, trees, strict=True):
            sequence.sampler.expect(tree)
        decides = any(not sequence.sampler.needs_rows for sequence in self.sequences)
        wanted = LogitsRead(max(counts, default=None), decides, self._choose_ahead)
        logits = self.target.node_logits(wanted)
        for sequence, rows in zip(self.sequences, logits, strict=True):
            sequence.sampler.load(rows)
        return logits

    def _choose_ahead(self, place: int, logits: torch.Tensor) -> tuple[torch.Tensor, ...] | None:
        sequence = self.sequences[place]
        return None if sequence.finished else sequence.sampler.choose_ahead(logits, sequence.text)

    @property
    def compiled(self) -> list[CompiledForward]:
        """Compiled forwards of the target and of the draft model."""
        forwards = [self.target.compiled, None if self.draft_runner is None else self.draft_runner.compiled]
        return [
            forward for place, forward in enumerate(forwards) if forward is not None and forward not in forwards[:place]
        ]

    @property
    def compile_seconds(self) -> float:
        """Seconds of compiling so far, those of earlier calls included."""
        return sum(forward.seconds for forward in self.compiled)

    def max_depth(self) -> int:
        """Most tokens that may be drafted one under the other: the one after the last of them must still fit."""
        most, positions = self.max_nodes, self.max_positions
        return most if positions is None else min(most, positions - 1 - self.target.position)

    def depths(self) -> list[int]:
        """Most depth of a draft that pays, for each sequence; 0 for none."""
        room = self.max_depth()
        return [self._depth(place, sequence, room) for place, sequence in enumerate(self.sequences)]

    def _depth(self, place: int, sequence: SequenceState, room: int) -> int:
        if sequence.stop_check.max_length is not None:
            room = min(room, sequence.stop_check.max_length - len(sequence.text) - 1)
        catches_up = self.target.rows.num_uncached[place] > MAX_UNCACHED  # a cache that has much to feed again
        return 0 if catches_up else max(room, 0)

    def fits(self, extra: ExtraTokens) -> bool:
        """Returns whether the model has positions and embeddings for all extra tokens."""
        positions, vocab_size = self.max_positions, self.vocab_size
        deepest, largest = max(extra.depths, default=0), max(extra.tokens, default=0)
        return (positions is None or self.target.position + deepest < positions) and (
            vocab_size is None or largest < vocab_size
        )
