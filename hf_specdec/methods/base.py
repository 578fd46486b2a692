"""What a drafter is: it reads the text so far and proposes a tree of likely next tokens.

A drafter never sees the model's cache or the decoding loop. One drafter serves one row of one call. It is also a
transformers `CandidateGenerator`, so the same object runs inside transformers' assisted decoding.

    drafter.begin(prompt_ids)
    tree = drafter.propose(budget=10)          # tree.tokens[0] is the last token of the text
    drafter.observe(tree, logits, accepted)    # accepted: the tokens that the step added to the text
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers.generation import CandidateGenerator

from hf_specdec.common.observer import DraftedNode
from hf_specdec.common.tree import ANY_DEPTH, DraftTree
from hf_specdec.methods.draw_noise import DrawNoise
from hf_specdec.methods.node_logits import NodeLogits

TOKEN_COST = 0.045  # what a token more adds to a forward of one, where nothing is known: a CPU, fp32


@dataclass(frozen=True, slots=True)
class DraftCost:
    """What a draft has to gain, in expected tokens; set before each `propose` where costs are known.

    Attributes:
        of_node (`float`): by one node; one that is less likely to be accepted is better left out.
        of_draft (`float`): by all nodes together beyond that, as a forward of two tokens may cost more than the second.
        of_forward (`float`): by what a draft network computes in as much time as a forward of the target takes.
        of_reading (`float`): by what it computes in as much time as the target reads a token of a prompt.
        num_steps (`float`): verify steps that are likely to come, over which the reading of a text is shared out.
    """

    of_node: float = 0.0
    of_draft: float = 0.0
    of_forward: float = 1.0
    of_reading: float = 0.0
    num_steps: float = math.inf


class Drafter(CandidateGenerator, ABC):
    """Base class of all drafters. Subclasses implement `begin`, `propose` and `observe`.

    What it draws from torch's global generators is no random number of the text's; it comes from a stream beside it.

    Attributes:
        needs_logits (`bool`): whether `observe` reads `logits`; if not, the loop passes `None`.
        num_top_logits (`int | None`): how many best next tokens of each node `observe` reads of them, 0 for the best
            alone; it gets them by `take_logits`, from the one transfer that the verification makes. `None` where it
            reads the whole rows.
        node_logits (`NodeLogits | None`): what was read for it; set before each `observe` that gets no `logits`.
        is_deterministic (`bool`): whether drafts depend on the text alone (then sampling stays seed-exact).
        never_drafts (`bool`): whether it always proposes the root alone. Over static caches a CUDA device then begins
            the next forward before the host has read the token, beside drafters of this package.
        max_extra_tokens (`int`): most extra tokens beside a tree; a static cache's forwards have room for them.
        draft_cost (`DraftCost`): what a draft has to gain.
        num_rows (`int`): rows that share the target's next forward; set before each `propose`.
        max_depth (`int`): drafted tokens one under the other that the text has room for; set before each `propose`.
            Deeper trees are cut.
        noise (`DrawNoise | None`): the random numbers of the draws to come, where tokens are drawn; set before each
            `propose`.
        view: what it shows of itself to `spec_observer` after a step, if anything.
    """

    needs_logits: bool = False
    num_top_logits: int | None = None
    node_logits: NodeLogits | None = None
    is_deterministic: bool = True
    never_drafts: bool = False
    max_extra_tokens: int = 0
    draft_cost: DraftCost = DraftCost()
    num_rows: int = 1
    max_depth: int = ANY_DEPTH
    noise: DrawNoise | None = None
    view: Any = None
    _assisted_ids: list[int] | None = None
    _assisted_tree: DraftTree | None = None

    @property
    def min_probability(self) -> float:
        """Probability of acceptance that is worth what a drafted node adds to the target's forward.

        Read after `propose`: trees that say how probable their nodes are are cut by it, unless a budget cuts them.
        """
        return 0.0

    @abstractmethod
    def begin(self, prompt_ids: Sequence[int]) -> None:
        """Start a new text.

        Args:
            prompt_ids (`Sequence[int]`): token ids of the prompt, at least one.
        """

    @abstractmethod
    def propose(self, budget: int) -> DraftTree:
        """Draft a tree below the last token of the text.

        Args:
            budget (`int`): most drafted tokens; 0 asks for the root alone.
        """

    @abstractmethod
    def observe(self, tree: DraftTree, logits: torch.Tensor | None, accepted: Sequence[int]) -> None:
        """Learn what became of `tree`.

        Args:
            tree (`DraftTree`): what was verified; after the prompt, a root alone.
            logits (`torch.Tensor`, *optional*): `(C, vocab_size)`, the target's raw logits after each node and extra
                token of `tree`; `None` unless `needs_logits`, and where `num_top_logits` says how much of them is read.
            accepted (`Sequence[int]`): the tokens that the step added to the text, at least one: drafted ones and the
                one after them.
        """

    def take_logits(self, logits: torch.Tensor | None) -> NodeLogits | None:
        """For `observe`: what was read for this drafter, or the `logits` that it was handed; `None` without either."""
        read, self.node_logits = self.node_logits, None
        return read if logits is None else NodeLogits(logits)

    def describe(self, tree: DraftTree) -> tuple[DraftedNode, ...]:
        """Where each drafted node of `tree` came from, node 1 first; asked after `observe`, and only for observers.

        Args:
            tree: what was verified: nodes that were proposed may be missing, and have other numbers.
        """
        return ()

    def end(self) -> None:
        """The text is finished, or was interrupted; store what should outlive the call."""

    # transformers' side: the loop there hands over the whole text each time and takes a chain.

    def get_candidates(self, input_ids: torch.LongTensor, **kwargs: object) -> tuple[torch.LongTensor, None]:
        """The text and one drafted chain after it, `(1, length + drafted)`; called by transformers' assisted loop."""
        text: list[int] = input_ids[0].tolist()
        self._follow(text)
        tree = DraftTree.chain(text[-1], self.propose(self.assisted_budget).first_branch())
        self._assisted_tree = tree
        drafted = input_ids.new_tensor(tree.tokens[1:]).unsqueeze(0)
        candidates = torch.cat([input_ids, drafted], dim=1)
        return candidates, None  # type: ignore[return-value]

    @property
    def assisted_budget(self) -> int:
        """Most tokens drafted a step inside transformers' loop."""
        return 10

    def update_candidate_strategy(self, input_ids: torch.LongTensor, scores: torch.Tensor, num_matches: int) -> None:
        """Nothing to do here: the next `get_candidates` sees what was accepted."""

    def _follow(self, text: list[int]) -> None:
        """Bring the drafter's text up to `text`; one that does not go on from the last one is a new text."""
        known = self._assisted_ids
        if known is None or self._assisted_tree is None or text[: len(known)] != known:
            self.begin(text)
        elif len(text) > len(known):
            self.observe(self._assisted_tree, None, text[len(known) :])
        self._assisted_ids = text
