"""The registry's entry of prompt lookup, and the pool of texts that its calls share."""

from hf_specdec.methods.common.drafter import BaseDrafter
from hf_specdec.methods.common.entry import DrafterContext, Method, MethodState, Source
from hf_specdec.methods.common.ngram.pool import NgramPool
from hf_specdec.methods.prompt_lookup.config import PromptLookupConfig
from hf_specdec.methods.prompt_lookup.drafter import PromptLookupDrafter


def _shared_pool(state: MethodState, config: PromptLookupConfig) -> NgramPool:
    """The pool of earlier texts, with the bound of `config`; made at first use."""
    pool = state.of(METHOD.name, lambda: NgramPool(config.max_pool_tokens))
    if pool.max_tokens != config.max_pool_tokens:
        pool.resize(config.max_pool_tokens)
    return pool


def _make(config: PromptLookupConfig, context: DrafterContext) -> BaseDrafter:
    pool = _shared_pool(context.state, config) if config.pool == "shared" else None
    return PromptLookupDrafter(config, pool, token_cost=context.token_cost, jump=context.jump)


METHOD = Method(
    name="prompt_lookup",
    aliases=("ngram",),
    config_class=PromptLookupConfig,
    config_arguments=("prompt_lookup_config", "ngram_config"),
    summary="drafts what followed the last tokens earlier in the text",
    make=_make,
    sources=(
        Source("text", "this text", "copied from where it stood before in this text", "T", "text"),
        Source("earlier_texts", "earlier texts", "copied from an earlier text", "E", "earlier_texts"),
    ),
)
