"""Rules that decide how a call is decoded: small functions of a request, in the order of their evaluation.

A rule returns a reason to decode plainly, or `None`. Cheap ones come first, those that need a probe last; those of
prompts that share a batch are at the end. There a forward takes nothing of a sequence but ids and positions, counted
from 0; the cache changes its shape, and is not returned.
"""

from collections.abc import Callable
from typing import Any

import torch
from transformers import (
    Cache,
    EncoderDecoderCache,
    EosTokenCriteria,
    MaxLengthCriteria,
    MaxTimeCriteria,
    PreTrainedModel,
    StaticCache,
    StopStringCriteria,
)

from hf_specdec.call.request import Request
from hf_specdec.compat import caches, fingerprint
from hf_specdec.compat.attention import cache_drop_length, rotary_modules, rotary_switch, scaled_length
from hf_specdec.compat.caches import attends_to_images, cached_length, is_users_own, passed_states
from hf_specdec.compat.devices import is_shared
from hf_specdec.compat.fingerprint import foreign_cache
from hf_specdec.compat.generation import (
    fresh_cache,
    has_foreign_inputs,
    has_own_cache,
    has_own_input_preparation,
    has_own_loop,
)
from hf_specdec.compat.models import has_virtual_tokens, is_recurrent, reads_prompts
from hf_specdec.engine.sampling.per_row import is_declared, is_pure, sees_one_row
from hf_specdec.engine.static_shapes import reason_against_buffers
from hf_specdec.forward.inputs import tensors_of
from hf_specdec.forward.model_runner import Tier
from hf_specdec.methods.common.draft_head import DraftHead

Rule = Callable[[Request], str | None]
ROW_WISE_CRITERIA = (
    MaxLengthCriteria,
    MaxTimeCriteria,
    EosTokenCriteria,
    StopStringCriteria,
)
OWN_LOOP = "its class decodes by a loop of its own"
MOST_COLUMNS = 512  # of a step, whatever drafts: lookahead's widest windows have some hundred
UNREAD = "the draft model has no positions for all of its prompt"
ONE_SEQUENCE = "transformers' assisted decoding takes one sequence, in one process"
NEW_TEXT = "transformers' assisted decoding takes a text of token ids that begins an own cache of keys and values"
SEQUENCE_TENSORS = ("attention_mask", "position_ids")  # of a prompt alone, all ones and a count


def own_loop(request: Request) -> str | None:
    """The class replaces the loop that drafts would enter."""
    return OWN_LOOP if has_own_loop(request.model) else None


def foreign_code(request: Request) -> str | None:
    """Code of the caller's may compress or evict keys and values, so that columns are no longer tokens of the text."""
    return fingerprint.foreign_code(request.model)


def foreign_inputs(request: Request) -> str | None:
    """Code from outside of transformers may prepare other inputs at any length of the text."""
    if has_foreign_inputs(request.model):
        return "code of its own prepares its inputs, and may prepare others at any length of the text"
    return None


def one_token_a_forward(request: Request) -> str | None:
    """The probe found no forward of several tokens right."""
    return request.probed.capability.reason if request.tier == "plain" else None


def scaled_attention(request: Request) -> str | None:
    """Attention goes by the number of columns within the call's texts, or within a step's after them."""
    length = request.facts.of(scaled_length, request.model)
    if length is None or not request.call.reaches(length - MOST_COLUMNS):
        return None
    return "its attention goes by the columns of the cache, of which a step has more than its text"


def dropped_cache(request: Request) -> str | None:
    """The model's class may compute its cache anew within the text, or forget the text."""
    length = request.facts.of(cache_drop_length, request.model)
    if length is None or not request.call.reaches(length + 1):
        return None
    return f"its class may compute the cache anew at {length + 1} tokens, within this text"


def rotary_frequencies(request: Request) -> str | None:
    """Rotary frequencies change within the text, or have changed before it."""
    switch = rotary_switch(request.facts.of(rotary_modules, request.model))
    if switch is None or not request.call.reaches(switch + 1):
        return None
    return "its rotary frequencies follow the text's length, which a forward of several tokens does not"


def assisted_loop(request: Request) -> str | None:
    """transformers' assisted decoding, where it is asked for, cannot take the call."""
    if not request.is_assisted:
        return None
    if request.num_rows > 1 or is_shared(request.model):
        return ONE_SEQUENCE
    call, model = request.call, request.model
    others = () if model.config.is_encoder_decoder else tensors_of(request.kwargs).keys() - {*SEQUENCE_TENSORS}
    is_new = not (others or call.reads_embeddings or cached_length(call.cache) or has_virtual_tokens(model))
    if not is_new or request.has_static_cache or is_recurrent(model) or not fresh_cache(model):
        return NEW_TEXT
    name = next((type(processor).__name__ for processor in call.logits_processor if not is_pure(processor)), None)
    return f"{name} may keep state, in which transformers' assisted decoding has rejected tokens" if name else None


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
    if not (config.return_dict_in_generate and (config.output_scores or config.output_logits)):
        return None
    name = "output_scores" if config.output_scores else "output_logits"
    if is_shared(request.model):
        return f"{name} shows what one of the model's processes alone chooses from"
    return f"{name} of a batch shows the padding after the ends of its texts" if request.num_rows > 1 else None


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
    return reason_against_buffers(request.model, request.tier, request.call.cache)


def padded_text(request: Request) -> str | None:
    """A single text's mask hides tokens from trees; chains go by the model's own mask."""
    if request.num_rows > 1 or request.is_assisted or request.tier != "tree" or not request.call.is_padded:
        return None
    reason = request.batch_reason()
    return None if reason is None else f"its attention_mask hides tokens, and {reason}"


def rows_in_step(model: PreTrainedModel, tier: Tier) -> str | None:
    """Reason why rows of one batch cannot each have a length of their own; `None` where they can."""
    if has_own_input_preparation(model) and cache_drop_length(model) is None:
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


def draft_of_rows(request: Request) -> str | None:
    """A draft model cannot follow rows that each have a length of their own."""
    draft = request.network
    if request.num_rows == 1 or draft is None or isinstance(draft, DraftHead) or not request.drafts_with_network:
        return None
    reason = rows_in_step(draft, request.draft[0])
    return None if reason is None else f"of {type(draft).__name__}, which drafts: {reason}"


def unread_prompt(request: Request) -> str | None:
    """The network has no positions for the prompt, and the method drafts with nothing else."""
    if not request.method.needs_assistant or request.network is None or request.drafts_with_network:
        return None
    return UNREAD


# What can be said of a model alone.
MODEL_RULES: tuple[Rule, ...] = (own_loop, foreign_code, foreign_inputs, one_token_a_forward)
# Why a call of a model that none of those rules out is decoded plainly.
CALL_RULES: tuple[Rule, ...] = (
    repeated_text,
    shared_states,
    shown_outputs,
    decoder_mask,
    assisted_loop,
    static_cache,
    scaled_attention,
    dropped_cache,
    rotary_frequencies,
    padded_text,
    rows,
)
# Why a call that passed the checks is decoded plainly.
CHECKED_RULES: tuple[Rule, ...] = (unread_prompt, draft_of_rows)


def one_by_one(wrapper: Any, request: Request) -> str | None:
    """Reason to decode prompts of different lengths one by one; `None` where they can share a batch.

    Args:
        wrapper: the model as the caller has it, perhaps in PEFT's.
    """
    model = request.model
    if reads_prompts(wrapper):
        return "PEFT's wrapper puts virtual tokens before each prompt, or looks in it for where its adapter begins"
    if has_own_loop(model):
        return OWN_LOOP
    if is_shared(model):
        return "several processes share it, which all decode one call"
    if request.is_assisted:
        return ONE_SEQUENCE
    if model.config.is_encoder_decoder:
        return "its decoder reads an encoding of each prompt"
    if has_own_input_preparation(model) or has_foreign_inputs(model):
        return "its class prepares the inputs of each forward itself"
    if (reason := foreign_code(request)) is not None:
        return reason
    return request.probed.capability.reason if request.tier != "tree" else request.batch_reason()


def alone(request: Request) -> str | None:
    """Reason to decode one prompt among others by itself; `None` where it can share their batch."""
    if request.is_assisted:
        return ONE_SEQUENCE
    if (reason := repeated_text(request)) is not None:
        return reason
    cache, ids = request.call.cache, request.call.input_ids
    if isinstance(cache, StaticCache) or is_users_own(cache):
        return f"it has a {type(cache).__name__} of its own"
    if rotary_frequencies(request) is not None:
        return "its rotary frequencies follow the length of its text"
    if (reason := scaled_attention(request)) is not None:
        return reason
    others = [name for name in tensors_of(request.kwargs) if name not in SEQUENCE_TENSORS]
    if others:
        return f"its forward takes {others[0].partition('.')[0]}"
    mask, positions = request.kwargs.get("attention_mask"), request.kwargs.get("position_ids")
    if mask is not None and not bool(mask.all()):
        return "its attention_mask hides tokens"
    count = torch.arange(ids.shape[1], device=ids.device)
    if positions is not None and (positions.shape[-1] != len(count) or not bool((positions == count).all())):
        return "its position_ids do not count from 0"
    return None
