"""The registry's entry of prompt lookup, and the pool of texts that its calls share."""

from hf_specdec.methods.common.drafter import BaseDrafter
from hf_specdec.methods.common.entry import DrafterContext, Method, Source
from hf_specdec.methods.common.ngrams import NgramPool
from hf_specdec.methods.prompt_lookup.config import PromptLookupConfig
from hf_specdec.methods.prompt_lookup.drafter import PromptLookupDrafter

MAX_POOL_TOKENS = 1_000_000


def _make(config: PromptLookupConfig, context: DrafterContext) -> BaseDrafter:
    pool = context.state.of(METHOD.name, lambda: NgramPool(MAX_POOL_TOKENS)) if config.pool == "shared" else None
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
