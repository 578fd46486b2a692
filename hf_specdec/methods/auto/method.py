"""The registry's entry of `auto`, the memory that its calls share, and what drafts without a compiled core."""

import logging

from hf_specdec.kernels import native
from hf_specdec.methods.auto.drafter import AutoDrafter, AutoSpecConfig
from hf_specdec.methods.auto.spec_memory import SpecMemory
from hf_specdec.methods.common.drafter import BaseDrafter
from hf_specdec.methods.common.entry import DrafterContext, Method, MethodState, Source
from hf_specdec.methods.prompt_lookup.config import PromptLookupConfig
from hf_specdec.methods.prompt_lookup.drafter import PromptLookupDrafter

ENABLED, WARNED = "auto, enabled", "auto, warned"  # names in a `MethodState`

logger = logging.getLogger("hf_specdec")


def give_memory(state: MethodState, memory: SpecMemory) -> None:
    """Let `auto` remember in `memory`."""
    state.by_name[ENABLED] = memory


def memory_in_use(state: MethodState) -> SpecMemory:
    """The memory that there is; made where there is none."""
    memory: SpecMemory | None = state.by_name.get(ENABLED)
    if memory is not None:
        return memory
    return state.of(METHOD.name, SpecMemory)


def _make(config: AutoSpecConfig, context: DrafterContext) -> BaseDrafter:
    remembers = config.pool == "shared" and not config.is_deterministic
    memory = memory_in_use(context.state) if remembers else None
    if native.core is None:
        return _looked_up(config, context, memory)
    return AutoDrafter(
        config,
        memory,
        scorer=context.scorer,
        logits_processor=context.logits_processor,
        is_sampled=context.is_sampled,
        takes_trees=context.takes_trees,
    )


def _looked_up(config: AutoSpecConfig, context: DrafterContext, memory: SpecMemory | None) -> BaseDrafter:
    """The drafter where there is no compiled core: n-grams of this text and of earlier ones."""
    if WARNED not in context.state.by_name:
        context.state.by_name[WARNED] = True
        logger.warning('spec_method="auto" looks up n-grams alone: no compiled core is installed')
    lookup = PromptLookupConfig(max_draft_len=min(config.node_budget, PromptLookupConfig().max_draft_len))
    pool = None if memory is None else memory.pool
    return PromptLookupDrafter(lookup, pool, token_cost=context.token_cost, jump=context.jump)


METHOD = Method(
    name="auto",
    config_class=AutoSpecConfig,
    config_arguments=("auto_config",),
    summary="combines this text, earlier texts, the target's own logits and a draft; as many tokens as save time",
    make=_make,
    takes_draft_model=True,
    takes_draft_head=True,
    sources=(
        Source(
            "recycled_logits",
            "recycled logits",
            "what the model thought likely after these tokens before",
            "R",
            "recycled_logits",
        ),
    ),
)
