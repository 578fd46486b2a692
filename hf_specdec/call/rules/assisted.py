"""Rules about transformers' assisted decoding, where a call asks for it by `engine="assisted"`."""

from collections.abc import Iterable

from transformers import SynthIDTextWatermarkingConfig

from hf_specdec import compat
from hf_specdec.call.facts import Facts
from hf_specdec.call.request import Request
from hf_specdec.compat.fingerprint import foreign_code
from hf_specdec.engine.sampling.row_processors import keeps_text
from hf_specdec.errors import ConfigError

ONE_SEQUENCE = "transformers' assisted decoding takes one sequence"
ASKED_FOR = "transformers' own assisted decoding was asked for"


def assisted_loop(facts: Facts, request: Request) -> str | None:
    """The loop itself cannot take the call."""
    if not request.is_assisted:
        return None
    if facts.num_rows > 1:
        return ONE_SEQUENCE
    if compat.has_virtual_tokens(facts.model):
        return "transformers' assisted decoding prepares no virtual tokens of PEFT's"
    if compat.is_recurrent(facts.model):
        return "transformers' assisted decoding leaves rejected tokens in a recurrent state"
    if facts.call.reads_embeddings and request.is_default:
        return "transformers' assisted decoding reads no inputs_embeds"
    if not compat.fresh_cache(facts.model):
        return "transformers' assisted decoding takes no cache that the model makes itself"
    if compat.cached_length(facts.cache):
        return "transformers' assisted decoding reads a text from its start, over the part that is cached"
    return _kept_text(facts.call.logits_processor)


def check_embeddings(facts: Facts, request: Request) -> None:
    """Refuse `inputs_embeds` where the loop is asked for by the call itself."""
    if request.is_assisted and facts.call.reads_embeddings:
        raise ConfigError("engine", 'must be "loop" for inputs_embeds', "assisted", "Drop the engine setting.")


def by_transformers(facts: Facts, request: Request) -> str | None:
    """Reason to let transformers' own `generate` draft with the call's draft model, before it has prepared the call.

    `None` where it would refuse the call, or give another result than plain generation: `assisted_loop` then says why.
    """
    if (reason := asked_for(request)) is None:
        return None
    settings, cache = request.settings, compat.given_cache(request.settings.arguments)
    is_static = isinstance(getattr(cache, "self_attention_cache", cache), compat.StaticCache)
    is_left_out = (
        compat.has_virtual_tokens(facts.model)
        or compat.is_recurrent(facts.model)
        or foreign_code(facts.model) is not None
        or settings("use_cache") is False
        or bool(settings("output_attentions"))
        or not compat.fresh_cache(facts.model)
        or bool(compat.cached_length(cache))
        or is_static
        or settings("cache_implementation") in ("static", *compat.STATIC_NAMES)
        or settings("guidance_scale") not in (None, 1)
        or isinstance(settings("watermarking_config"), SynthIDTextWatermarkingConfig)
        or _kept_text(settings.arguments.get("logits_processor") or ()) is not None
    )
    return None if is_left_out else reason


def asked_for(request: Request) -> str | None:
    """Reason to leave the draft model to transformers' assisted decoding; `None` where the call does not ask for it."""
    return ASKED_FOR if request.is_assisted and request.assistant_model is not None else None


def _kept_text(processors: Iterable[object]) -> str | None:
    """A processor keeps what it is called for, rejected tokens among it."""
    for processor in processors:
        if keeps_text(processor):
            return (
                f"{type(processor).__name__} keeps state, in which transformers' assisted decoding has rejected tokens"
            )
    return None
