"""The registry's entry of `auto`, and the memory that its calls share."""

from hf_specdec.methods.auto.config import AutoSpecConfig
from hf_specdec.methods.auto.drafter import AutoDrafter
from hf_specdec.methods.auto.spec_memory import SpecMemory
from hf_specdec.methods.common.drafter import BaseDrafter
from hf_specdec.methods.common.entry import DrafterContext, Method, MethodState, Source

GIVEN = "auto, given"


def give_memory(state: MethodState, memory: SpecMemory) -> None:
    """Let `auto` remember in `memory`, with its bounds, whatever a configuration says."""
    state.by_name[GIVEN] = memory


def memory_in_use(state: MethodState, config: AutoSpecConfig) -> SpecMemory:
    """The memory that there is, whatever its bounds; made with those of `config` where there is none."""
    given: SpecMemory | None = state.by_name.get(GIVEN)
    if given is not None:
        return given
    return state.of(METHOD.name, lambda: SpecMemory(config.max_pool_tokens, config.max_recycled))


def _memory(state: MethodState, config: AutoSpecConfig) -> SpecMemory:
    """The memory in use, with the bounds of `config` unless it was given."""
    memory = memory_in_use(state, config)
    if GIVEN not in state.by_name:
        memory.resize(config.max_pool_tokens, config.max_recycled)
    return memory


def _make(config: AutoSpecConfig, context: DrafterContext) -> BaseDrafter:
    return AutoDrafter(
        config,
        _memory(context.state, config) if config.pool == "shared" and not config.is_deterministic else None,
        scorer=context.scorer,
        translation=context.translation,
        logits_processor=context.logits_processor,
        is_sampled=context.is_sampled,
        takes_trees=context.takes_trees,
    )


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
