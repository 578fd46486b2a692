"""Rules about what a call reads besides token ids: masks, images, its cache; and about several rows at once."""

from transformers import (
    Cache,
    EncoderDecoderCache,
    EosTokenCriteria,
    MaxLengthCriteria,
    MaxTimeCriteria,
    PreTrainedModel,
    QuantizedCache,
    StaticCache,
    StaticLayer,
    StopStringCriteria,
)

from hf_specdec.call.request import Request
from hf_specdec.compat import caches
from hf_specdec.compat.caches import CACHE, attends_to_images, is_users_own, passed_states
from hf_specdec.compat.fingerprint import foreign_cache
from hf_specdec.compat.generation import has_own_cache, has_own_input_preparation, unbounded_layers
from hf_specdec.engine.sampling.row_processors import is_declared, sees_one_row
from hf_specdec.engine.static_shapes import compile_settings, holds_states, longest_cache, reason_against_buffers
from hf_specdec.errors import ConfigError
from hf_specdec.forward.model_runner import Tier

ROW_WISE_CRITERIA = (
    MaxLengthCriteria,
    MaxTimeCriteria,
    EosTokenCriteria,
    StopStringCriteria,
)


def repeated_text(request: Request) -> str | None:
    """The cache holds something else than the text once."""
    if (use_cache := request.kwargs.get("use_cache", True)) is None:
        return "with use_cache=None transformers caches the whole text again with each token"
    if not use_cache:
        return "with use_cache=False each step computes the whole text"
    cache = request.call.cache
    if (name := foreign_cache(cache)) is not None:
        return f"its cache has code of its own ({name}), which may do more than keep the text's columns"
    is_shared = isinstance(cache, Cache) and not isinstance(cache, EncoderDecoderCache)
    if request.model.config.is_encoder_decoder and is_shared:
        return f"its self- and cross-attention share the {type(cache).__name__} that was passed"
    return None


def shared_states(request: Request) -> str | None:
    """A decoder attends to images or states that the caller passes."""
    sees_images = caches.sees_images(request.model, request.kwargs)
    if sees_images and request.kwargs.get("cross_attention_mask") is None:
        return "without a cross_attention_mask several tokens see less of an image than one does"
    states = passed_states(request.model, request.kwargs)
    return f"its decoder attends to {next(iter(states))} besides its text" if states else None


def shown_outputs(request: Request) -> str | None:
    """Attention weights or hidden states are returned, of each token alone; or scores of rows that have ended."""
    config = request.call.generation_config
    if config.output_attentions or (config.output_hidden_states and config.return_dict_in_generate):
        name = "output_attentions" if config.output_attentions else "output_hidden_states"
        return f"{name} shows what each token's own forward computes"
    if request.num_rows > 1 and config.return_dict_in_generate and (config.output_scores or config.output_logits):
        name = "output_scores" if config.output_scores else "output_logits"
        return f"{name} of a batch shows the padding after the ends of its texts"
    return None


def decoder_mask(request: Request) -> str | None:
    """A mask of the decoder hides tokens from chains."""
    mask = request.kwargs.get("decoder_attention_mask")
    if mask is not None and request.tier == "chain" and not bool(mask.all()):
        return "its decoder_attention_mask hides tokens, which forwards of one token may see and those of several not"
    return None


def static_cache(request: Request) -> str | None:
    """A static cache cannot take buffers of fixed shapes in its place."""
    if not request.has_static_cache:
        return None
    if attends_to_images(request.model.config):
        return "its static cache holds an image's keys and values among the text's"
    cache = request.call.cache
    if request.tier != "tree" or not holds_states(cache):
        return reason_against_buffers(request.model, request.tier, cache)
    if compile_settings(request.call) is None:
        return None
    return "plain generation compiles its forwards over a static cache, and no compiled one records states"


def check_passed_cache(request: Request) -> None:
    """Refuse caches of the caller's that cannot be handed back as plain generation would leave them.

    Raises:
        ConfigError: the cache is offloaded or quantized, or a static one that is too short for the longest text.
    """
    cache = request.call.cache
    if request.is_assisted or not is_users_own(cache):
        return
    inner = getattr(cache, "self_attention_cache", cache)
    if getattr(inner, "offloading", False) or isinstance(inner, QuantizedCache):
        kind = f"offloaded {type(inner).__name__}" if getattr(inner, "offloading", False) else type(inner).__name__
        remedy = "Pass a DynamicCache or a StaticCache without offloading, or leave it out."
        raise ConfigError(CACHE, "must be neither offloaded nor quantized with spec_method", kind, remedy)
    if not isinstance(inner, StaticCache):
        return
    needed = longest_cache(request.call)
    for layer, full in zip(inner.layers, unbounded_layers(inner, request.model), strict=True):
        if isinstance(layer, StaticLayer) and layer.max_cache_len < min(full.max_cache_len, needed):
            rule = f"must have a max_cache_len of at least {needed} for a text of that length with spec_method"
            remedy = "Make a longer StaticCache, or lower max_new_tokens."
            raise ConfigError(CACHE, rule, layer.max_cache_len, remedy)


def padded_text(request: Request) -> str | None:
    """A single text's mask hides tokens from trees; chains go by the model's own mask."""
    if request.num_rows > 1 or request.is_assisted or request.tier != "tree" or not request.call.is_padded:
        return None
    reason = request.batch_reason()
    return None if reason is None else f"its attention_mask hides tokens, and {reason}"


def rows_in_step(model: PreTrainedModel, tier: Tier) -> str | None:
    """Reason why rows of one batch cannot each have a length of their own; `None` where they can."""
    if has_own_input_preparation(model):
        return "its class prepares the inputs of each forward itself, for rows of one length"
    return None if tier == "tree" else "rows of one batch each have a length of their own, which only trees can have"


def rows(request: Request) -> str | None:
    """Rows go at their own pace only where nothing has to see all of them at once."""
    if request.num_rows == 1:
        return None
    if (reason := rows_in_step(request.model, request.tier)) is not None:
        return reason
    is_padded = request.kwargs.get("attention_mask") is not None and not request.model.config.is_encoder_decoder
    if is_padded and request.facts.of(has_own_cache, request.model):
        return "padding meets cache layers of the model's own, which a few tokens cannot try out"
    if request.call.streamer is not None:
        return "a streamer of several sequences gets one token of each at a time"
    for processor in request.call.logits_processor:
        if not sees_one_row(processor):
            return _undeclared(processor)
    return _rows_of_criteria(request) or request.batch_reason()


def _rows_of_criteria(request: Request) -> str | None:
    """A stopping criterion looks at all rows, or rows end together."""
    ends_rows, ends_texts = False, False
    for criterion in request.call.stopping_criteria:
        if type(criterion) not in ROW_WISE_CRITERIA and not is_declared(criterion):
            return _undeclared(criterion)
        ends_texts |= isinstance(criterion, EosTokenCriteria)
        ends_rows |= not isinstance(criterion, MaxLengthCriteria | EosTokenCriteria)
    if ends_rows and not ends_texts:
        return "without an end-of-text token no sequence ends before the others"
    return None


def _undeclared(item: object) -> str:
    name = type(item).__name__
    if type(item).__module__.startswith("transformers."):
        return f"transformers' {name} may look at several sequences at once; generate one prompt at a time"
    remedy = "set its `row_safe = True`, or wrap it in hf_specdec.PerRow where it keeps state"
    return f"{name} may look at several sequences at once; if it does not, {remedy}"
