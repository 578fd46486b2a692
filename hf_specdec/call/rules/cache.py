"""Rules about the cache of a call: what it holds besides the text's keys and values, and its length."""

from hf_specdec import compat
from hf_specdec.call.facts import Facts
from hf_specdec.call.request import Request
from hf_specdec.compat.fingerprint import foreign_cache
from hf_specdec.engine.static_shapes import compile_settings, holds_states, longest_cache, reason_against_buffers
from hf_specdec.errors import ConfigError


def repeated_text(facts: Facts, request: Request) -> str | None:
    """The cache holds something else than the text once."""
    if (use_cache := facts.kwargs.get("use_cache", True)) is None:
        return "with use_cache=None transformers caches the whole text again with each token"
    if not use_cache:
        return "with use_cache=False each step computes the whole text"
    if (name := foreign_cache(facts.cache)) is not None:
        return f"its cache has code of its own ({name}), which may do more than keep the text's columns"
    is_shared = isinstance(facts.cache, compat.Cache) and not isinstance(facts.cache, compat.EncoderDecoderCache)
    if facts.model.config.is_encoder_decoder and is_shared:
        return f"its self- and cross-attention share the {type(facts.cache).__name__} that was passed"
    return None


def static_cache(facts: Facts, request: Request) -> str | None:
    """A static cache cannot take buffers of fixed shapes in its place."""
    if not facts.has_static_cache:
        return None
    if request.is_assisted:
        return 'engine="assisted" takes no static cache'
    if compat.attends_to_images(facts.model.config):
        return "its static cache holds an image's keys and values among the text's"
    if facts.tier == "tree" and holds_states(facts.cache):
        if compile_settings(facts.call) is not None:
            return "plain generation compiles its forwards over a static cache, and no compiled one records states"
        return None
    return reason_against_buffers(facts.model, facts.tier, facts.cache)


def check_given_cache(facts: Facts, request: Request) -> None:
    """Refuse caches of the caller's that cannot be handed back as plain generation would leave them.

    Raises:
        ConfigError: the cache is offloaded or quantized, or a static one that is too short for the longest text.
    """
    if request.is_assisted or not compat.is_users_own(facts.cache):
        return
    inner = getattr(facts.cache, "self_attention_cache", facts.cache)
    if getattr(inner, "offloading", False) or isinstance(inner, compat.QuantizedCache):
        kind = f"offloaded {type(inner).__name__}" if getattr(inner, "offloading", False) else type(inner).__name__
        remedy = "Pass a DynamicCache or a StaticCache without offloading, or leave it out."
        raise ConfigError(compat.CACHE, "must be neither offloaded nor quantized with spec_method", kind, remedy)
    if not isinstance(inner, compat.StaticCache):
        return
    needed = longest_cache(facts.call)
    for layer, full in zip(inner.layers, compat.unbounded_layers(inner, facts.model), strict=True):
        if isinstance(layer, compat.StaticLayer) and layer.max_cache_len < min(full.max_cache_len, needed):
            raise ConfigError(
                compat.CACHE,
                f"must have a max_cache_len of at least {needed} for a text of that length with spec_method",
                layer.max_cache_len,
                "Make a longer StaticCache, or lower max_new_tokens.",
            )
