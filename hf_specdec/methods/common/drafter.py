"""Drafters: they read the text so far and propose a tree of likely next tokens.

A drafter never sees the model's cache or the decoding loop. One drafter serves one row of one call. It is also a
transformers `CandidateGenerator`, so the same object runs inside transformers' assisted decoding.

    drafter.begin(prompt_ids)
    tree = drafter.draft_for(DraftRequest(budget=10))        # tree.tokens[0] is the last token of the text
    drafter.learn_from(DraftResult(tree, accepted, logits))  # accepted: the tokens that the step added to the text
"""

import inspect
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers.generation import CandidateGenerator

from hf_specdec.common.stats import DraftedNode
from hf_specdec.common.tree import ANY_DEPTH, DraftTree
from hf_specdec.errors import ConfigError
from hf_specdec.methods.common.node_logits import Array, NodeLogits
from hf_specdec.methods.common.sampling import DrawNoise

TOKEN_COST = 0.045  # what a token more adds to a forward of one, where nothing is known: a CPU, fp32


def _nothing(count: int) -> float:
    """Tokens that drafts have to gain which cost nothing."""
    return 0.0


@dataclass(frozen=True, slots=True)
class DraftCost:
    """Expected tokens that a draft has to gain.

    Attributes:
        of_node (`float`): by one node, wherever it is cheapest; one that is less likely to be accepted is better left
            out.
        of_nodes (`Callable[[int], float]`): by so many nodes together, by what the target's forward of them takes.
        of_forward (`float`): by what a draft network computes in as much time as a forward of the target takes.
        of_reading (`float`): by what it computes in as much time as the target reads a token of a prompt.
        num_steps (`float`): verify steps that are likely to come, over which the reading of a text is shared out.
    """

    of_node: float = 0.0
    of_nodes: Callable[[int], float] = _nothing
    of_forward: float = 1.0
    of_reading: float = 0.0
    num_steps: float = math.inf


NO_COST = DraftCost()


@dataclass(frozen=True, slots=True)
class DraftRequest:
    """Request for the draft of one step.

    Attributes:
        budget (`int`): most drafted tokens; 0 asks for the root alone.
        max_depth (`int`): most drafted tokens along one branch: the text has room for so many. Deeper trees are cut.
        num_rows (`int`): rows that share the target's next forward.
        cost (`DraftCost`): expected tokens that the draft has to gain.
        noise (`DrawNoise | None`): random numbers of the draws to come, where tokens are drawn.
    """

    budget: int
    max_depth: int = ANY_DEPTH
    num_rows: int = 1
    cost: DraftCost = NO_COST
    noise: DrawNoise | None = None


@dataclass(frozen=True, slots=True)
class DraftResult:
    """Outcome of one step.

    Attributes:
        tree (`DraftTree`): the verified tree; after the prompt, a root alone.
        accepted (`Sequence[int]`): tokens that the step added to the text, at least one: drafted ones and the one after
            them. Those that a grammar forces come before the step that verifies them, after a root alone.
        logits (`NodeLogits | None`): the target's logits after each node and extra token of `tree`; `None` unless the
            drafter `needs_logits`.
    """

    tree: DraftTree
    accepted: Sequence[int]
    logits: NodeLogits | None = None


class BaseDrafter(CandidateGenerator, ABC):
    """Base class of all drafters. Subclasses implement `begin`, `draft_for` and `learn_from`.

    Attributes:
        needs_logits (`bool`): whether `learn_from` reads logits.
        num_top_logits (`int | None`): best next tokens of each node that `learn_from` reads of them, 0 for the best
            alone; they come with the one transfer that the verification makes. `None` where it reads the whole rows.
        num_prompt_logits (`int`): tokens before a prompt's last one after which `learn_prompt` is to be told the
            `num_top_logits` likeliest, at most.
        never_drafts (`bool`): whether it always proposes the root alone.
        max_extra_tokens (`int`): most extra tokens besides a tree; a static cache's forwards have room for them.
    """

    needs_logits: bool = False
    num_top_logits: int | None = None
    num_prompt_logits: int = 0
    never_drafts: bool = False
    max_extra_tokens: int = 0
    _assisted_ids: list[int] | None = None
    _assisted_tree: DraftTree | None = None

    @property
    def min_probability(self) -> float:
        """Probability of acceptance that is worth what a drafted node adds to the target's forward.

        Read after `draft_for`: trees that say how probable their nodes are are cut by it, unless a budget cuts them.
        """
        return 0.0

    @abstractmethod
    def begin(self, prompt_ids: Sequence[int]) -> None:
        """Start a new text, or a text anew.

        Args:
            prompt_ids (`Sequence[int]`): token ids of the prompt, at least one.
        """

    def learn_prompt(self, tokens: Array, log_probs: Array) -> None:
        """Learn what the target thought likely after the last `n` tokens of the prompt but one; called after `begin`.

        Args:
            tokens (`ndarray`): `(n, num_top_logits)`, the likeliest next tokens of the frequent ones and the prompt's.
            log_probs (`ndarray`): their log probabilities among these.
        """

    @abstractmethod
    def draft_for(self, request: DraftRequest) -> DraftTree:
        """Draft a tree below the last token of the text."""

    @abstractmethod
    def learn_from(self, result: DraftResult) -> None:
        """Learn what became of the last tree."""

    def describe(self, tree: DraftTree) -> tuple[DraftedNode, ...]:
        """Describe where each drafted node of `tree` came from, node 1 first, for observers; or give no descriptions.

        Called after `learn_from`, or after `begin` where the text did not go on as a grammar forces it to.

        Args:
            tree: the verified tree: nodes that were proposed may be missing, and have other numbers.
        """
        return ()

    def end(self) -> None:
        """Store what should outlive the call: the text is finished, or was interrupted."""

    # transformers' side: the loop there hands over the whole text each time and takes a chain.

    def get_candidates(self, input_ids: torch.LongTensor, **kwargs: object) -> tuple[torch.LongTensor, None]:
        """Give the text and one drafted chain after it, `(1, length + drafted)`, to transformers' assisted loop."""
        text: list[int] = input_ids[0].tolist()
        self._follow(text)
        tree = DraftTree.chain(text[-1], self.draft_for(DraftRequest(self.assisted_budget)).first_branch())
        self._assisted_tree = tree
        drafted = input_ids.new_tensor(tree.tokens[1:]).unsqueeze(0)
        candidates = torch.cat([input_ids, drafted], dim=1)
        return candidates, None  # type: ignore[return-value]

    @property
    def assisted_budget(self) -> int:
        """Most tokens drafted a step inside transformers' loop."""
        return 10

    def update_candidate_strategy(self, input_ids: torch.LongTensor, scores: torch.Tensor, num_matches: int) -> None:
        """Do nothing: the next `get_candidates` sees what was accepted."""

    def _follow(self, text: list[int]) -> None:
        """Bring the drafter's text up to `text`; one that does not go on from the last one is a new text."""
        before = self._assisted_ids
        if before is None or self._assisted_tree is None or text[: len(before)] != before:
            self.begin(text)
        elif len(text) > len(before):
            self.learn_from(DraftResult(self._assisted_tree, text[len(before) :]))
        self._assisted_ids = text


class Drafter(BaseDrafter):
    """Base class of drafters of your own. Subclasses implement `begin`, `propose` and `observe`.

    Numbers that it draws from torch's global generators are not those of the text; they come from another stream.

    Attributes:
        needs_logits (`bool`): whether `observe` reads `logits`.
        never_drafts (`bool`): whether it always proposes the root alone.
        max_extra_tokens (`int`): most extra tokens besides a tree; a static cache's forwards have room for them.
        request (`DraftRequest`): everything that the step asks for, while `propose` runs: `request.max_depth`,
            `request.num_rows`, `request.cost` and `request.noise` besides the budget.
    """

    request: DraftRequest = DraftRequest(0)

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
            tree (`DraftTree`): the verified tree, which a grammar may have pruned, and continued by the tokens that it
                forces; after the prompt, a root alone.
            logits (`torch.Tensor`, *optional*): `(C, vocab_size)`, the target's raw logits after each node and extra
                token of `tree`; `None` unless `needs_logits`.
            accepted (`Sequence[int]`): tokens that the step added to the text, at least one: drafted ones and the one
                after them. Those that a grammar forces come before the step that verifies them, after a root alone.
        """

    def draft_for(self, request: DraftRequest) -> DraftTree:
        """Call `propose`; see `BaseDrafter.draft_for`."""
        self.request = request
        return self.propose(request.budget)

    def learn_from(self, result: DraftResult) -> None:
        """Call `observe`; see `BaseDrafter.learn_from`."""
        self.observe(result.tree, None if result.logits is None else result.logits.logits, result.accepted)


def maker_of(value: Any) -> Callable[[], BaseDrafter]:
    """Finds the function that makes the drafter of a sequence, of an own `Drafter`, its class, or what makes one.

    Raises:
        ConfigError: `value` is neither a `Drafter` nor callable without arguments, or its class lacks methods. The
            maker raises it where what was made is no `Drafter`.
    """
    if isinstance(value, BaseDrafter):
        return lambda: value
    if inspect.isabstract(value):
        missing = ", ".join(sorted(value.__abstractmethods__))
        raise ConfigError("spec_method", f"must define {missing}", value, "See the methods of hf_specdec.Drafter.")
    if _needs_arguments(value):
        raise ConfigError("spec_method", "must be callable without arguments", value, "Wrap it in a lambda.")

    def make() -> BaseDrafter:
        made = value()
        if not isinstance(made, BaseDrafter):
            raise ConfigError("spec_method", "must return a Drafter", made, "Subclass hf_specdec.Drafter.")
        return made

    return make


def _needs_arguments(make: Callable[..., Any]) -> bool:
    """True if a callable has parameters without a default; `False` where it does not tell, as built-in types."""
    try:
        inspect.signature(make).bind()
    except (TypeError, ValueError) as error:
        return isinstance(error, TypeError)
    return False
