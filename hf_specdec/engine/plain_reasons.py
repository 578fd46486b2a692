"""Why a call is decoded plainly, by transformers, or apart from the prompts beside it."""

from typing import Any

import torch
from transformers import PreTrainedModel

from hf_specdec import compat
from hf_specdec.engine.batch_rules import assisted_fallback_reason, batch_fallback_reason, padding_fallback_reason
from hf_specdec.engine.call import Call
from hf_specdec.engine.exit_pairing import check_exit
from hf_specdec.engine.length_rules import exceeds_original_length, reason_against_length, scales_by_columns
from hf_specdec.engine.static_shapes import check_cache, reason_against_static
from hf_specdec.errors import ConfigError, UnsupportedModelError
from hf_specdec.forward.capabilities.findings import Found
from hf_specdec.forward.capabilities.probe import Capability
from hf_specdec.forward.target.inputs import rows_of, tensors_of
from hf_specdec.methods.registry import METHODS
from hf_specdec.request.request import Request

OWN_LOOP = "its class decodes by a loop of its own"
SEQUENCE_TENSORS = ("attention_mask", "position_ids")  # of a prompt alone, all ones and a count


def plain_reason(call: Call, request: Request, found: Found) -> str | None:
    """Why a call decodes without speculation, if it does."""
    if compat.has_own_loop(call.model):
        return OWN_LOOP
    if compat.places_adapters(call.model):
        return (
            "PEFT's aLoRA counts tokens from a forward's end; a LoRA adapter without alora_invocation_tokens does not"
        )
    if found.capability.tier == "plain":
        return found.capability.reason
    if (reason := _reason_against_cache(call)) is not None:
        return reason
    if (reason := _reason_against_states(call, found)) is not None:
        return reason
    if call.generation_config.output_attentions and call.generation_config.return_dict_in_generate:
        return "the model's own generate asks for attention, which over a tree is not the text's"
    mask = call.model_kwargs.get("decoder_attention_mask")
    if found.capability.tier == "chain" and mask is not None and not bool(mask.all()):
        return "its decoder_attention_mask hides tokens, which forwards of one token may see and those of several not"
    if (reason := reason_against_static(call, found.capability.tier, request.config.engine)) is not None:
        return reason
    if request.is_default and (reason := _reason_against_default(call, request, found)) is not None:
        return reason
    if (reason := reason_against_length(call, request, found.capability.tier)) is not None:
        return reason
    if request.config.engine == "assisted":
        return _reason_against_assisted(call, request)
    if len(call.input_ids) == 1:
        return padding_fallback_reason(call, found)
    mask = call.model_kwargs.get("attention_mask")
    has_own_cache = call.facts.of(compat.has_own_cache, call.model)
    if mask is not None and not call.model.config.is_encoder_decoder and has_own_cache:
        return "padding meets cache layers of the model's own, which a few tokens cannot try out"
    return batch_fallback_reason(call) or found.batch_fallback_reason(call.model, encoder_kwargs(call))


def _reason_against_assisted(call: Call, request: Request) -> str | None:
    """Why transformers' assisted decoding cannot take a call, or `None`."""
    if len(call.input_ids) > 1:
        return "transformers' assisted decoding takes one sequence"
    if compat.has_virtual_tokens(call.model):
        return "transformers' assisted decoding prepares no virtual tokens of PEFT's"
    if compat.is_recurrent(call.model):
        return "transformers' assisted decoding leaves rejected tokens in a recurrent state"
    if call.reads_embeddings and request.is_default:
        return "transformers' assisted decoding reads no inputs_embeds"
    if not compat.fresh_cache(call.model):
        return "transformers' assisted decoding takes no cache that the model makes itself"
    if compat.cached_length(call.model_kwargs.get(compat.cache_name(call.model_kwargs))):
        return "transformers' assisted decoding reads a text from its start, over the part that is cached"
    return assisted_fallback_reason(call.logits_processor)


def _reason_against_cache(call: Call) -> str | None:
    """Why a call's cache holds something else than its text once, or `None`."""
    kwargs = call.model_kwargs
    if kwargs.get("use_cache", True) is None:
        return "with use_cache=None transformers caches the whole text again with each token"
    cache = kwargs.get(compat.cache_name(kwargs))
    if (name := compat.foreign_code(cache)) is not None:
        return f"its cache has code of its own ({name}), which may do more than keep the text's columns"
    is_shared = isinstance(cache, compat.Cache) and not isinstance(cache, compat.EncoderDecoderCache)
    if call.model.config.is_encoder_decoder and is_shared:
        return f"its self- and cross-attention share the {type(cache).__name__} that was passed"
    return None


def _reason_against_states(call: Call, found: Found) -> str | None:
    """Why a decoder that attends to states or images of the caller's decodes plainly, or `None`."""
    kwargs = call.model_kwargs
    if compat.sees_images(call.model, kwargs) and kwargs.get("cross_attention_mask") is None:
        return "without a cross_attention_mask several tokens see less of an image than one does"
    states = compat.given_states(call.model, kwargs)
    return found.states_reason(call.model, states) if states else None


def one_by_one_reason(given: Any, request: Request, found: Found) -> str | None:
    """Why prompts of different lengths are decoded one by one, if they are.

    Args:
        given: the model, perhaps in a wrapper.
    """
    if compat.adds_virtual_tokens(given):
        return "PEFT's wrapper puts virtual tokens before each prompt"
    if compat.finds_invocations(given):
        return "PEFT's wrapper looks in each prompt for its adapter's alora_invocation_tokens"
    model = compat.generation_model(given)
    if compat.has_own_loop(model):
        return OWN_LOOP
    if (reason := _assisted_reason(request)) is not None:
        return reason
    if model.config.is_encoder_decoder:
        return "its decoder reads an encoding of each prompt"
    if compat.has_own_input_preparation(model):
        return "its class prepares the inputs of each forward itself"
    if found.capability.tier != "tree":
        return found.capability.reason
    return found.batch_fallback_reason(model)


def alone_reason(call: Call, request: Request) -> str | None:
    """Why one prompt among others is decoded by itself, if it is.

    In a shared batch a forward takes nothing of a sequence but ids and positions, counted from 0; the cache changes its
    shape, and nobody looks at it afterwards.
    """
    if (reason := _assisted_reason(request)) is not None:
        return reason
    if (reason := _reason_against_cache(call)) is not None:
        return reason
    kwargs = call.model_kwargs
    cache = kwargs.get(compat.cache_name(kwargs))
    if isinstance(cache, compat.StaticCache) or compat.is_users_own(cache):
        return f"it has a {type(cache).__name__} of its own"
    if exceeds_original_length(call):
        return "its rotary frequencies follow the length of its text"
    if scales_by_columns(call):
        return "its attention goes by the columns of the cache"
    others = [name for name in tensors_of(kwargs) if name not in SEQUENCE_TENSORS]
    if others:
        return f"its forward takes {others[0].partition('.')[0]}"
    mask, positions = kwargs.get("attention_mask"), kwargs.get("position_ids")
    if mask is not None and not bool(mask.all()):
        return "its attention_mask hides tokens"
    counted = torch.arange(call.input_ids.shape[1], device=call.input_ids.device)
    if positions is not None and (positions.shape[-1] != len(counted) or not bool((positions == counted).all())):
        return "its position_ids do not count from 0"
    return None


def transformers_reason(request: Request) -> str | None:
    """Why a draft model is left to transformers' own assisted decoding, if it is."""
    if request.assistant_model is None:
        return None
    return "transformers' own assisted decoding was asked for" if request.config.engine == "assisted" else None


def _assisted_reason(request: Request) -> str | None:
    """Why transformers' assisted decoding takes one prompt after the other, if it was asked for."""
    if request.config.engine != "assisted":
        return None
    return transformers_reason(request) or "transformers' assisted decoding takes one sequence"


def _reason_against_default(call: Call, request: Request, found: Found) -> str | None:
    """Why a method that was not asked for in the call itself cannot be honoured, or `None`."""
    layers = request.config.drafting_layers
    try:
        if layers is not None:
            check_exit(call, layers)
        check_tier(call.model, request, found.capability)
        check_cache(call)
    except (ConfigError, UnsupportedModelError) as error:
        return str(error)
    return None


def check_tier(model: PreTrainedModel, request: Request, found: Capability) -> None:
    """Refuse a method that is of no use on a model that verifies chains only."""
    if found.tier == "tree" or request.method is None or not request.method.needs_tree:
        return
    others = ", ".join(repr(name) for name, method in METHODS.items() if not method.needs_tree and name != "plain")
    raise UnsupportedModelError(
        f"spec_method={request.name!r} needs a model that verifies trees; {type(model).__name__} takes chains only: "
        f"{found.reason}. Methods that work with it: {others}."
    )


def encoder_kwargs(call: Call) -> dict[str, Any] | None:
    """What the probe needs to try a decoder: this call's own encoded input, of its first row."""
    names = ("encoder_outputs", "attention_mask")
    found = {name: call.model_kwargs[name] for name in names if call.model_kwargs.get(name) is not None}
    return rows_of(found, [0], len(call.input_ids)) if "encoder_outputs" in found else None
