"""What a method is to the rest of the package: a name, a configuration, and how to make its drafter.

A new method is one folder with a configuration, a drafter and a `Method`, and one line in `registry.py`.

    MY_METHOD = Method(name="my_method", config_class=MyConfig, summary="drafts ...", make=make)
"""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import torch
from transformers import PreTrainedModel

from hf_specdec.methods.common.config import SpecConfig
from hf_specdec.methods.common.draft_head import DraftHead
from hf_specdec.methods.common.draft_scorer import DraftScorer
from hf_specdec.methods.common.drafter import TOKEN_COST, BaseDrafter
from hf_specdec.methods.common.processed_rows import LogitsProcessorFn
from hf_specdec.methods.common.translation import Translation

Kept = TypeVar("Kept")


@dataclass(slots=True)
class MethodState:
    """What the methods remember between calls on one model; copied and pickled with it. Knows no method.

    Attributes:
        by_name (`dict[str, Any]`): what each method keeps, under names that begin with its own.
    """

    by_name: dict[str, Any] = field(default_factory=dict)

    def of(self, name: str, make: Callable[[], Kept]) -> Kept:
        """What is kept under `name`; made at first use."""
        if name not in self.by_name:
            self.by_name.setdefault(name, make())
        kept: Kept = self.by_name[name]
        return kept

    def __getstate__(self) -> dict[str, Any]:
        return {"by_name": dict(self.by_name)}  # another thread may add to it while a copy is made

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.by_name = state["by_name"]


@dataclass(frozen=True, slots=True)
class DrafterContext:
    """What the drafter of one sequence may use besides its configuration.

    Attributes:
        state: what the methods remember between calls.
        scorer: the draft model, with this sequence's text.
        logits_processor: the call's logits processors for the draft model, when sampling.
        generator: the sequence's random generator; `None` is the global one.
        is_sampled: whether the call draws its tokens.
        takes_trees: whether the target verifies siblings.
        token_cost: what a drafted token more a row adds to a forward of so many rows, over that of one token a row,
            where a row has so many drafted tokens.
        jump: what a forward of several tokens a row adds beside that, whatever their number; also by rows.
        translation: the sequence's text in the draft model's vocabulary, where that is another one.
    """

    state: MethodState
    scorer: DraftScorer | None = None
    logits_processor: LogitsProcessorFn | None = None
    generator: torch.Generator | None = None
    is_sampled: bool = False
    takes_trees: bool = True
    token_cost: Callable[[int, int], float] = lambda num_rows, num_nodes: TOKEN_COST
    jump: Callable[[int], float] = lambda num_rows: 0.0
    translation: Translation | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Method:
    """One entry of the registry.

    Attributes:
        name (`str`): what `spec_method` says.
        aliases (`tuple[str, ...]`): other names for it.
        config_class (`type[SpecConfig]`): its configuration.
        config_arguments (`tuple[str, ...]`): arguments of `generate` that carry its configuration.
        summary (`str`): one line for tables.
        make: makes the drafter of one sequence of one call.
        needs_tree (`bool`): whether it is of no use where a model verifies chains only.
        needs_draft_model (`bool`): whether it needs an `assistant_model`.
        takes_draft_model (`bool`): whether it uses an `assistant_model` that is given.
        needs_draft_head (`bool`): whether it needs an `assistant_model` that reads the target's hidden states.
        takes_draft_head (`bool`): whether it uses one that is given.
        own_head: makes the head out of the target's own checkpoint, where the call brings none.
        as_head: makes a head of a transformers model that is one, and `None` of any other object.
    """

    name: str
    config_class: type[SpecConfig]
    summary: str
    make: Callable[[Any, DrafterContext], BaseDrafter]
    aliases: tuple[str, ...] = ()
    config_arguments: tuple[str, ...] = ()
    needs_tree: bool = False
    needs_draft_model: bool = False
    takes_draft_model: bool = False
    needs_draft_head: bool = False
    takes_draft_head: bool = False
    own_head: Callable[[PreTrainedModel], DraftHead] | None = None
    as_head: Callable[[object], DraftHead | None] | None = None

    @property
    def needs_assistant(self) -> bool:
        """Whether it needs an `assistant_model` of one kind or the other."""
        return self.needs_draft_model or self.needs_draft_head

    @property
    def needs_model(self) -> bool:
        """Whether it drafts with a network: an `assistant_model`, or a part of the target's checkpoint."""
        return self.needs_assistant or self.own_head is not None

    def with_state(self, state: MethodState) -> "Method":
        """The same method, keeping what it learns in `state` instead of on the model."""
        return replace(self, make=lambda config, context: self.make(config, replace(context, state=state)))
