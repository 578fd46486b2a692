"""Refusals of arguments that have no speculative form, before anything is computed."""

import operator
from typing import Any

import torch
from transformers import PreTrainedModel

from hf_specdec import compat
from hf_specdec.call.assisted_arguments import check_taken
from hf_specdec.call.facts import Facts
from hf_specdec.call.request import Request, Settings
from hf_specdec.compat.rotary import position_limit
from hf_specdec.errors import ConfigError
from hf_specdec.methods.common.draft_head import DraftHead

CACHES = (None, "dynamic", "static", "hybrid", *compat.STATIC_NAMES)  # transformers takes "hybrid" for no choice
LENGTHS = ("max_new_tokens", "max_length", "min_new_tokens", "min_length")
LEAVE_OUT = "Pass spec_method=None for this call."


def check_settings(settings: Settings) -> None:
    """Refuse decoding modes that have no speculative form.

    Raises:
        ConfigError: names the first setting that asks for one.
    """

    def refuse(name: str, rule: str, instead: object) -> None:
        configured = f"A generation configuration sets it: pass {name}={instead!r}, or change it there."
        passed = f"Pass {name}={instead!r}, or spec_method=None for this call."
        remedy = passed if name in settings.arguments else f"{configured} Or pass spec_method=None."
        raise ConfigError(name, f"must be {rule}", settings(name), remedy)

    for name in LENGTHS:
        if settings(name) is not None and not _is_whole(settings(name)):
            remedy = "Write 64, without quotes or a decimal point."
            raise ConfigError(name, "must be a whole number", settings(name), remedy)
    if (settings("num_beams") or 1) > 1:
        refuse("num_beams", "1 with spec_method (beam search has no speculative form)", 1)
    for name in ("penalty_alpha", "dola_layers", "constraints", "force_words_ids", "token_healing"):
        if settings(name):
            refuse(name, "unset with spec_method", None)
    if settings("cache_implementation") not in CACHES:
        refuse("cache_implementation", 'unset, "dynamic" or "static" with spec_method', "dynamic")


def modes(facts: Facts, request: Request) -> None:
    """Refuse settings of the call."""
    check_settings(request.settings)
    arguments = request.settings.arguments
    if (assistant := arguments.get("assistant_model")) is not None:
        method = assistant.methods[0] if isinstance(assistant, DraftHead) else "draft_model"
        remedy = f'Use spec_method="{method}" or "auto", which draft with it. Or pass spec_method=None.'
        raise ConfigError("assistant_model", "must be unset with this spec_method", type(assistant).__name__, remedy)
    if arguments.get("synced_gpus"):
        raise ConfigError("synced_gpus", "must be False with spec_method", True, LEAVE_OUT)


def assisted_arguments(facts: Facts, request: Request) -> None:
    """Refuse transformers' arguments of assisted generation that the method does not take over."""
    check_taken(request.settings, request.method)


def streamer(facts: Facts, request: Request) -> None:
    """Refuse a streamer that is none."""
    streamer = request.settings.arguments.get("streamer")
    if streamer is not None and not all(callable(getattr(streamer, name, None)) for name in ("put", "end")):
        remedy = "Pass a transformers streamer, such as TextStreamer(tokenizer)."
        raise ConfigError("streamer", "must have the methods put and end", type(streamer).__name__, remedy)


def custom_generate(facts: Facts, request: Request) -> None:
    """Refuse another decoding loop."""
    if (custom := request.settings.arguments.get("custom_generate")) is not None:
        remedy = "Leave out one of the two for this call."
        raise ConfigError("custom_generate", "must be unset with spec_method", custom, remedy)


def prompt(facts: Facts, request: Request) -> None:
    """Refuse prompts that the model cannot read."""
    arguments = request.settings.arguments
    ids = arguments.get("input_ids") if arguments.get("inputs") is None else arguments["inputs"]
    check_prompt(facts.model, ids, has_embeddings=arguments.get("inputs_embeds") is not None)


def check_prompt(model: PreTrainedModel, ids: Any, *, has_embeddings: bool, of_decoder: bool = False) -> None:
    """Refuse token ids that the model cannot read; `(batch, length)`.

    Args:
        of_decoder: whether the decoder reads the ids, where the model has an encoder.

    Raises:
        ConfigError: they are no token ids, or not this model's, or more than it has positions for.
    """
    if ids is not None and not isinstance(ids, torch.Tensor):
        remedy = 'For text, generate(**tokenizer(text, return_tensors="pt"), ...).'
        raise ConfigError("input_ids", "must be a tensor", type(ids).__name__, remedy)
    if ids is None or (ids.is_floating_point() and model.main_input_name != "input_ids"):
        return  # sound or images
    if ids.dtype not in (torch.int32, torch.int64):
        raise ConfigError("input_ids", "must be torch.int64 or torch.int32", ids.dtype, "Write input_ids.long().")
    if ids.dim() < 2:
        raise ConfigError("input_ids", "must be of shape (batch, length)", tuple(ids.shape), "Write input_ids[None].")
    if ids.dim() > 2:
        return
    if ids.numel() == 0:
        if not has_embeddings:
            raise ConfigError("input_ids", "must hold at least one token", tuple(ids.shape), "Put one in the prompt.")
        return
    largest, smallest = int(ids.max()), int(ids.min())
    rows = compat.num_embeddings(model, of_decoder=of_decoder)
    if smallest < 0 or (rows is not None and largest >= rows):
        rule = f"must be at least 0 and below {rows} (the tokens that the model embeds)"
        wrong = smallest if smallest < 0 else largest
        raise ConfigError("input_ids", rule, wrong, "Use the model's own tokenizer.")
    positions = None if model.config.is_encoder_decoder else position_limit(model, reach=ids.shape[1])
    if positions is not None:
        rule = f"must be at most {positions} tokens long (the model's max_position_embeddings)"
        raise ConfigError("input_ids", rule, ids.shape[1], "Shorten the prompt, or use a model with more positions.")


def _is_whole(value: Any) -> bool:
    """Returns whether Python takes a value as an integer, as it does a tensor of one."""
    try:
        operator.index(value)
    except TypeError:
        return False
    return True
