"""The methods by name: for each its configuration class and how to make its drafter.

A new method is one drafter file, one configuration class and one entry here.

    method = resolve("ngram")                       # the entry of "prompt_lookup"
    drafter = method.make(method.config_class(), Setup(memory))
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import torch

from hf_specdec.errors import unknown_name
from hf_specdec.methods.auto.config import AutoSpecConfig
from hf_specdec.methods.auto.drafter import AutoDrafter
from hf_specdec.methods.auto.spec_memory import SpecMemory
from hf_specdec.methods.base import Drafter
from hf_specdec.methods.config import PlainConfig, SpecConfig
from hf_specdec.methods.draft_model.acceptance import AcceptanceCounts
from hf_specdec.methods.draft_model.config import DraftModelConfig
from hf_specdec.methods.draft_model.drafter import DraftModelDrafter, LogitsProcessorFn
from hf_specdec.methods.draft_model.scorer import DraftScorer
from hf_specdec.methods.lookahead.config import LookaheadConfig
from hf_specdec.methods.lookahead.drafter import LookaheadDrafter
from hf_specdec.methods.ngram.pool import NgramPool
from hf_specdec.methods.plain.drafter import PlainDrafter
from hf_specdec.methods.prompt_lookup.config import PromptLookupConfig
from hf_specdec.methods.prompt_lookup.drafter import PromptLookupDrafter

__all__ = ["METHODS", "DrafterContext", "Method", "MethodState", "config_arguments", "resolve"]


@dataclass(slots=True)
class MethodState:
    """What a model remembers between calls, by method; kept on the model, copied and pickled with it.

    Attributes:
        given (`SpecMemory | None`): memory of `auto` that the user gave the model; its bounds count, not the
            configuration's.
    """

    pools: dict[str, Any] = field(default_factory=dict)
    given: SpecMemory | None = None

    def ngram_pool(self, config: PromptLookupConfig) -> NgramPool:
        """The shared pool of prompt lookup; made at first use, made anew when its size changes."""
        pool = self.pools.get("prompt_lookup")
        if not isinstance(pool, NgramPool) or pool.max_tokens != config.max_pool_tokens:
            pool = self.pools["prompt_lookup"] = NgramPool(config.max_pool_tokens)
        return pool

    def acceptance_counts(self, config: DraftModelConfig, relative_cost: float) -> AcceptanceCounts:
        """What drafts of one shape came to in earlier calls, with a draft model of this size."""
        name = f"draft_model, {config.num_branches} branches, {relative_cost:.6f}"
        counts: AcceptanceCounts = self.pools.setdefault(name, AcceptanceCounts())
        return counts

    def of_auto(self, config: AutoSpecConfig) -> SpecMemory:
        """What `auto` remembers: what the user gave, else made at first use, and anew when the bounds change."""
        if self.given is not None:
            return self.given
        memory, bounds = self.pools.get("auto"), (config.max_pool_tokens, config.max_recycled)
        if not isinstance(memory, SpecMemory) or memory.bounds != bounds:
            memory = self.pools["auto"] = SpecMemory(*bounds)
        return memory

    def used_by_auto(self, config: AutoSpecConfig) -> SpecMemory:
        """The memory of `auto` that is there, whatever its bounds; made with those of `config` where there is none."""
        memory = self.pools.get("auto") if self.given is None else self.given
        return memory if isinstance(memory, SpecMemory) else self.of_auto(config)


@dataclass(frozen=True, slots=True)
class DrafterContext:
    """What the drafter of one row may use besides its configuration.

    Attributes:
        memory: what the model remembers between calls.
        scorer: the draft model, with this row's text.
        logits_processor: the call's logits processors for the draft model, when sampling.
        generator: the row's random generator; `None` is the global one.
        is_sampled: whether the call draws its tokens.
        takes_trees: whether the target verifies siblings.
    """

    memory: MethodState
    scorer: DraftScorer | None = None
    logits_processor: LogitsProcessorFn | None = None
    generator: torch.Generator | None = None
    is_sampled: bool = False
    takes_trees: bool = True


def _never(config: SpecConfig) -> bool:
    return False


@dataclass(frozen=True, slots=True)
class Method:
    """One entry of the registry.

    Attributes:
        name (`str`): what `spec_method` says.
        aliases (`tuple[str, ...]`): other names for it.
        config_class (`type[SpecConfig]`): its configuration.
        config_arguments (`tuple[str, ...]`): arguments of `generate` that carry its configuration.
        summary (`str`): one line for tables.
        make: makes the drafter of one row of one call.
        budget: most tokens drafted a step under a configuration.
        needs_tree (`bool`): whether it is of no use where a model verifies chains only.
        needs_draft_model (`bool`): whether it needs an `assistant_model`.
        takes_draft_model (`bool`): whether it uses an `assistant_model` that is given.
        fits_costs: whether under a configuration each step drafts as much as pays, by what forwards cost.
    """

    name: str
    aliases: tuple[str, ...]
    config_class: type[SpecConfig]
    config_arguments: tuple[str, ...]
    summary: str
    make: Callable[[Any, DrafterContext], Drafter]
    budget: Callable[[Any], int]
    needs_tree: bool = False
    needs_draft_model: bool = False
    takes_draft_model: bool = False
    fits_costs: Callable[[Any], bool] = _never


def _plain(config: PlainConfig, setup: DrafterContext) -> Drafter:
    return PlainDrafter()


def _prompt_lookup(config: PromptLookupConfig, setup: DrafterContext) -> Drafter:
    return PromptLookupDrafter(config, setup.memory.ngram_pool(config) if config.pool == "shared" else None)


def _lookahead(config: LookaheadConfig, setup: DrafterContext) -> Drafter:
    return LookaheadDrafter(config)


def _draft_model(config: DraftModelConfig, setup: DrafterContext) -> Drafter:
    assert setup.scorer is not None
    memory = setup.memory.acceptance_counts(config, setup.scorer.relative_cost)
    return DraftModelDrafter(
        config, setup.scorer, logits_processor=setup.logits_processor, generator=setup.generator, memory=memory
    )


def _auto(config: AutoSpecConfig, setup: DrafterContext) -> Drafter:
    return AutoDrafter(
        config,
        setup.memory.of_auto(config) if config.pool == "shared" else None,
        scorer=setup.scorer,
        is_sampled=setup.is_sampled,
        takes_trees=setup.takes_trees,
    )


_ENTRIES = (
    Method(
        name="plain",
        aliases=(),
        config_class=PlainConfig,
        config_arguments=(),
        summary="this package's loop with nothing drafted",
        make=_plain,
        budget=lambda config: 0,
    ),
    Method(
        name="prompt_lookup",
        aliases=("ngram",),
        config_class=PromptLookupConfig,
        config_arguments=("prompt_lookup_config", "ngram_config"),
        summary="drafts what followed the last tokens earlier in the text",
        make=_prompt_lookup,
        budget=lambda config: config.node_budget,
    ),
    Method(
        name="lookahead",
        aliases=(),
        config_class=LookaheadConfig,
        config_arguments=("lookahead_config",),
        summary="collects n-grams from a window of guesses about the text to come",
        make=_lookahead,
        budget=lambda config: config.node_budget,
        needs_tree=True,
    ),
    Method(
        name="draft_model",
        aliases=("draft_target",),
        config_class=DraftModelConfig,
        config_arguments=("draft_model_config", "draft_target_model_config"),
        summary="drafts with a smaller model of the same vocabulary",
        make=_draft_model,
        budget=lambda config: config.node_budget,
        needs_draft_model=True,
        takes_draft_model=True,
    ),
    Method(
        name="auto",
        aliases=(),
        config_class=AutoSpecConfig,
        config_arguments=("auto_config",),
        summary="drafts from all of the text, earlier texts and the target's own logits, as much as pays",
        make=_auto,
        budget=lambda config: config.node_budget,
        takes_draft_model=True,
        fits_costs=lambda config: config.num_nodes is None,
    ),
)
METHODS: Mapping[str, Method] = MappingProxyType({method.name: method for method in _ENTRIES})


def resolve(name: str) -> Method:
    """The method called `name`, by its name or an alias.

    Raises:
        ConfigError: there is none; the error names the nearest match.
    """
    for method in METHODS.values():
        if name == method.name or name in method.aliases:
            return method
    raise unknown_name("spec_method", name, [n for m in METHODS.values() for n in (m.name, *m.aliases)])


def config_arguments() -> dict[str, Method]:
    """Arguments of `generate` that carry a configuration, and the method each belongs to."""
    return {argument: method for method in METHODS.values() for argument in method.config_arguments}
