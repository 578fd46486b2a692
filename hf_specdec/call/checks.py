"""Refusals of calls that have no speculative form: of arguments before anything is prepared, of prepared calls after.

A check raises what is wrong with a call that asks for its method itself; a method by default then decodes plainly.
"""

from collections.abc import Callable
from typing import Any

import torch
from transformers import (
    PreTrainedModel,
    QuantizedCache,
    StaticCache,
    StaticLayer,
)

from hf_specdec.call.arguments import ASSISTED_ARGUMENTS, MODES
from hf_specdec.call.request import Request
from hf_specdec.compat.attention import position_limit
from hf_specdec.compat.caches import CACHE, STATIC_NAMES, is_users_own
from hf_specdec.compat.generation import (
    unbounded_layers,
)
from hf_specdec.compat.models import num_embeddings
from hf_specdec.engine.head_pairing import check_head
from hf_specdec.engine.static_shapes import longest_cache
from hf_specdec.errors import ConfigError, UnsupportedModelError
from hf_specdec.methods.common.draft_head import DraftHead
from hf_specdec.methods.registry import METHODS

Check = Callable[[Request], None]
CACHES = (None, "dynamic", "static", "hybrid", *STATIC_NAMES)  # transformers takes "hybrid" for no choice
LENGTHS = ("max_new_tokens", "max_length", "min_new_tokens", "min_length")


def check_settings(request: Request) -> None:
    """Refuse decoding modes that have no speculative form.

    Raises:
        ConfigError: names the first setting that asks for one.
    """

    modes = ("penalty_alpha", "dola_layers", "constraints", "force_words_ids", "token_healing")
    refused: dict[str, tuple[str, object]] = {name: ("unset", None) for name in modes if request.setting(name)}
    refused |= {"num_beams": ("1", 1)} if (request.setting("num_beams") or 1) > 1 else {}
    if request.setting("cache_implementation") not in CACHES:
        refused["cache_implementation"] = 'unset, "dynamic" or "static"', "dynamic"
    for name, (rule, instead) in refused.items():
        remedy = f"Pass {name}={instead!r}, or spec_method=None for this call."
        raise ConfigError(name, f"must be {rule} with spec_method", request.setting(name), remedy)


def passed_objects(request: Request) -> None:
    """Refuse another decoding loop, and drafts that the method does not draft with."""
    arguments = request.arguments
    for name in ("custom_generate", "synced_gpus"):
        if value := arguments.get(name):
            raise ConfigError(name, "must be unset with spec_method", value, "Leave out one of the two for this call.")
    if (assistant := arguments.get("assistant_model")) is not None:
        method = assistant.methods[0] if isinstance(assistant, DraftHead) else "draft_model"
        remedy = f'Use spec_method="{method}" or "auto", which draft with it. Or pass spec_method=None.'
        raise ConfigError("assistant_model", "must be unset with this spec_method", type(assistant).__name__, remedy)


def check_taken(request: Request) -> None:
    """Refuse transformers' arguments of assisted generation.

    Raises:
        ConfigError: names the first of them, and what takes its place.
    """
    method = request.method
    for name in ASSISTED_ARGUMENTS:
        value = request.setting(name) if name in MODES else request.arguments.get(name)
        if value is None or value is False:
            continue
        unset = f"pass {name}=None, as a generation configuration sets it, or change it there"
        left_out = "leave it out" if name in request.arguments else unset
        drafting = f'spec_method="{method.name}"' if method.name else "a drafter of your own"
        remedy = f"Say it by spec_method and spec_config; {left_out}, or pass spec_method=None."
        raise ConfigError(name, f"must be unset with {drafting}", value, remedy)
    if (tokenizer := request.arguments.get("assistant_tokenizer")) is not None:
        rule, remedy = "must come with an assistant_model", "Leave it out, or add one."
        raise ConfigError("assistant_tokenizer", rule, type(tokenizer).__name__, remedy)


def prompt(request: Request) -> None:
    """Refuse prompts that the model cannot read."""
    arguments = request.arguments
    ids = arguments.get("input_ids") if arguments.get("inputs") is None else arguments["inputs"]
    check_prompt(request.model, ids, has_embeddings=arguments.get("inputs_embeds") is not None)


def check_prompt(model: PreTrainedModel, ids: Any, *, has_embeddings: bool, of_decoder: bool = False) -> None:
    """Refuse token ids that the model cannot read; `(batch, length)`.

    Args:
        of_decoder: whether the decoder reads the ids, where the model has an encoder.

    Raises:
        ConfigError: they are no token ids, or not this model's, or more than it has positions for.
    """
    is_tensor = isinstance(ids, torch.Tensor)
    if ids is None or (is_tensor and ids.is_floating_point() and model.main_input_name != "input_ids"):
        return  # sound or images
    if not is_tensor or ids.dim() < 2 or ids.dtype not in (torch.int32, torch.int64):
        value = f"{ids.dtype} of {tuple(ids.shape)}" if is_tensor else type(ids).__name__
        remedy = 'Write generate(**tokenizer(text, return_tensors="pt"), ...).'
        raise ConfigError("input_ids", "must be a tensor of torch.int64, (batch, length)", value, remedy)
    if ids.dim() > 2 or (ids.numel() == 0 and has_embeddings):
        return
    if ids.numel() == 0:
        raise ConfigError("input_ids", "must hold at least one token", tuple(ids.shape), "Put one in the prompt.")
    largest, smallest = int(ids.max()), int(ids.min())
    rows = num_embeddings(model, of_decoder=of_decoder)
    if smallest < 0 or (rows is not None and largest >= rows):
        rule = f"must be at least 0 and below {rows} (the tokens that the model embeds)"
        wrong = smallest if smallest < 0 else largest
        raise ConfigError("input_ids", rule, wrong, "Use the model's own tokenizer.")
    positions = None if model.config.is_encoder_decoder else position_limit(model, reach=ids.shape[1])
    if positions is not None:
        rule = f"must be at most {positions} tokens long (the model's max_position_embeddings)"
        raise ConfigError("input_ids", rule, ids.shape[1], "Shorten the prompt, or use a model with more positions.")


def check_draft(request: Request, field: str = "assistant_model", hint: str = "") -> None:
    """Raise where the method needs a draft model and the call brings none.

    Args:
        field: name of the draft model in the call.
        hint: comes before the remedy where it is missing.

    Raises:
        ConfigError: `assistant_model` is missing.
    """
    method = request.method
    if request.assistant_model is not None or not method.needs_assistant:
        return
    remedy = "Pass a smaller model of the same vocabulary."
    if method.needs_draft_head:
        remedy = "Pass hf_specdec.AutoDraftHead.from_pretrained(path) of a head for this model."
    raise ConfigError(field, f'must be given with spec_method="{method.name}"', None, f"{hint}{remedy}")


def chains_only(request: Request) -> None:
    """Refuse a method that is of no use on a model that verifies chains only."""
    if request.tier == "tree" or not request.method.needs_tree:
        return
    others = ", ".join(repr(name) for name, method in METHODS.items() if not method.needs_tree and name != "plain")
    raise UnsupportedModelError(
        f"spec_method={request.method.name!r} needs a model that verifies trees; {request.model_name} takes chains "
        f"only: {request.probed.capability.reason}. Methods that work with it: {others}."
    )


def network(request: Request) -> None:
    """Refuse a draft model or head that does not go with the target, and a prompt without text that it could read."""
    if (drafts := request.network) is None:
        return
    is_head = isinstance(drafts, DraftHead)
    if is_head:
        check_head(request.model, drafts)
    else:
        request.draft  # noqa: B018 - the look-up checks that both models go together
    if request.call.input_ids.shape[1] == 0:
        rule = f"must be unset with a draft {'head' if is_head else 'model'}"
        remedy = f"Pass input_ids, which the {'head' if is_head else 'draft'} reads too."
        raise ConfigError("inputs_embeds", rule, "given", remedy)


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


# What is refused before transformers prepares the call.
REQUEST_CHECKS: tuple[Check, ...] = (passed_objects, check_draft, check_settings, check_taken, prompt)
# What is refused of a call that no rule decodes plainly.
CHECKS: tuple[Check, ...] = (chains_only, check_passed_cache, network)
