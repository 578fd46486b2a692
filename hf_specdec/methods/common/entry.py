"""Entries of the registry: a method's name, its configuration, its drafter, and the draft heads that are its own.

A method is one folder whose `method.py` holds a `METHOD`: its configuration, how to make its drafter, how to recognise
and load its draft heads if it has any, and the words for where its drafts come from.

    METHOD = Method(name="my_method", config_class=MyConfig, summary="drafts ...", make=make)
"""

import copy
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch

from hf_specdec.methods.common.config import SpecConfig
from hf_specdec.methods.common.draft_head import DraftHead
from hf_specdec.methods.common.draft_scorer import DraftScorer
from hf_specdec.methods.common.drafter import TOKEN_COST, BaseDrafter
from hf_specdec.methods.common.sampling import LogitsProcessorFn
from hf_specdec.methods.common.translation import Translation

Kept = TypeVar("Kept")


@dataclass(slots=True)
class MethodState:
    """Memory of the methods between calls on one model; copied and pickled with it.

    Attributes:
        by_name (`dict[str, Any]`): what each method keeps, under names that begin with its own.
    """

    by_name: dict[str, Any] = field(default_factory=dict)

    def of(self, name: str, make: Callable[[], Kept]) -> Kept:
        """Get what is kept under `name`; made at first use."""
        if name not in self.by_name:
            self.by_name.setdefault(name, make())
        kept: Kept = self.by_name[name]
        return kept

    def __getstate__(self) -> dict[str, Any]:
        return {"by_name": dict(self.by_name)}  # another thread may add to it while a copy is made

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.by_name = state["by_name"]


class SharedState:
    """Base class of what several threads use: who reads or changes it holds `_lock`; a copy is of one moment."""

    def __init__(self) -> None:
        self._lock = threading.Lock()

    def __getstate__(self) -> dict[str, Any]:
        with self._lock:
            return copy.deepcopy({name: value for name, value in vars(self).items() if name != "_lock"})

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._lock = threading.Lock()


@dataclass(frozen=True, slots=True)
class DrafterContext:
    """Parts of a call that the drafter of one sequence may use besides its configuration.

    Attributes:
        state: memory of the methods between calls.
        scorer: the draft model, with this sequence's text.
        logits_processor: the call's logits processors for the draft model, when sampling.
        generator: the sequence's random generator; `None` is the global one.
        is_sampled: whether the call draws its tokens.
        takes_trees: whether the target verifies siblings.
        token_cost: cost of a drafted token more a row, over that of a forward of one token a row; by the number of rows
            and of drafted tokens a row.
        jump: cost of a forward of several tokens a row besides that, whatever their number; by the number of rows.
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


@dataclass(frozen=True, slots=True)
class Source:
    """Origin of drafted tokens, as pictures and legends name it.

    Attributes:
        key (`str`): value of `DraftedNode.source`.
        label (`str`): a few words.
        meaning (`str`): the same in one sentence.
        letter (`str`): sign where there is no room for words.
        style (`str`): line and colour in the demo's style sheet; heads share one, as a race has one of them.
    """

    key: str
    label: str
    meaning: str
    letter: str = "H"
    style: str = "head"


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadKind:
    """Draft heads of one kind: how to recognise and load them.

    Attributes:
        is_config: tells by the values of a config.json whether a folder holds such a head.
        load: `load(path, dtype=None, **hub)` reads a head from a folder or the hub.
        of_target: `of_target(target, path=None)` makes a head of the target's own checkpoint, or of that at `path`.
    """

    is_config: Callable[[Mapping[str, Any]], bool] = lambda values: False
    load: Callable[..., DraftHead] | None = None
    of_target: Callable[..., DraftHead] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Method:
    """One entry of the registry.

    Attributes:
        name (`str`): value of `spec_method`.
        aliases (`tuple[str, ...]`): other names for it.
        config_class (`type[SpecConfig]`): its configuration.
        config_arguments (`tuple[str, ...]`): arguments of `generate` that carry its configuration.
        summary (`str`): one line for tables.
        make: makes the drafter of one sequence of one call.
        needs_tree (`bool`): whether it is of no use where a model verifies chains only.
        needs_draft_model (`bool`): whether it needs an `assistant_model`.
        takes_draft_model (`bool`): whether it uses an `assistant_model` that is given.
        translates (`bool`): whether that model may have a tokenizer of its own.
        needs_draft_head (`bool`): whether it needs an `assistant_model` that reads the target's hidden states.
        takes_draft_head (`bool`): whether it uses one that is given.
        head (`HeadKind | None`): draft heads that are its own.
        sources (`tuple[Source, ...]`): origins of drafted tokens that it adds to those of other methods.
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
    translates: bool = False
    needs_draft_head: bool = False
    takes_draft_head: bool = False
    head: HeadKind | None = None
    sources: tuple[Source, ...] = ()

    @property
    def checkpoint_head(self) -> Callable[..., DraftHead] | None:
        """Maker of a head out of the target's own checkpoint, where a call brings none."""
        return None if self.head is None else self.head.of_target

    @property
    def needs_assistant(self) -> bool:
        """True if it needs an `assistant_model` of one kind or the other."""
        return self.needs_draft_model or self.needs_draft_head
