"""Arguments with which transformers' own `generate` prepares a call, and the devices of its models."""

import operator
from typing import Any

import torch
from transformers import PreTrainedModel

from hf_specdec import compat
from hf_specdec.call.assisted_arguments import STARTING
from hf_specdec.call.request import Request, Settings
from hf_specdec.call.rules.settings import LENGTHS
from hf_specdec.distributed.placement import is_placed, move, move_pair, read_devices
from hf_specdec.engine.head_pairing import place_head
from hf_specdec.errors import ConfigError
from hf_specdec.methods.common.draft_head import DraftHead
from hf_specdec.methods.registry import as_head


def decoding_arguments(model: PreTrainedModel, request: Request) -> dict[str, Any]:
    """Arguments of `generate` for a decoding method of this package, to which it hands the prepared call.

    Raises:
        ConfigError: `stop_strings` without a tokenizer.
    """
    settings = request.settings
    criteria = _stop_strings(model, settings)
    left_out = [*STARTING, *(["stop_strings"] if criteria else []), *_left_out_of_cache(model, settings)]
    arguments = settings.without(*left_out) | criteria | _own_values(model, request, left_out)
    arguments.pop("tokenizer", None)
    return arguments


def assisted_arguments(model: PreTrainedModel, request: Request) -> dict[str, Any]:
    """Arguments of `generate` for transformers' assisted generation with the call's draft model."""
    arguments = {**request.settings.arguments, **_own_values(model, request, ())}
    if request.tokenizers is not None:
        arguments["assistant_tokenizer"] = request.tokenizers[1]
    return {**arguments, "assistant_model": request.assistant_model}


def plain_arguments(request: Request) -> dict[str, Any]:
    """Arguments of `generate` without what the method took over.

    transformers would begin its assisted generation for that, which refuses most of what the method refuses.
    """
    taken = [name for name in STARTING if name in request.config.transformers_arguments]
    arguments = request.settings.without(*taken)
    if as_head(arguments.get("assistant_model")) is not None:  # transformers drafts with none
        del arguments["assistant_model"]
    return arguments


def place_models(model: PreTrainedModel, request: Request, *, has_begun: bool = False) -> None:
    """Put the models where the configuration's device lists say.

    A draft head without a list goes where the target reads its inputs.

    Args:
        has_begun (`bool`): whether the call has begun, so that the target cannot be moved any more.

    Raises:
        ConfigError: a device that is not here, or a model that cannot be put there.
    """
    draft, lists = request.assistant_model, request.config.device_lists
    target_devices, field = lists.get("target"), request.config.device_fields.get("target", "")
    if target_devices is not None and has_begun and not is_placed(model, read_devices(target_devices, field)):
        remedy = "Enable the model, so that generate moves it, or move it first."
        raise ConfigError(field, "must name where the target is with custom_generate", target_devices, remedy)
    if isinstance(draft, DraftHead):
        place_head(draft, model, request.config)
        draft = None
    if draft is not None:
        move_pair(model, draft, target_devices=target_devices, draft_devices=lists.get("draft"))
    elif target_devices is not None:
        move(model, target_devices, field)


def _own_values(model: PreTrainedModel, request: Request, left_out: Any) -> dict[str, Any]:
    """Values that take the place of the caller's.

    Lengths are integers of Python: NumPy's and tensors have no `bit_length`, which buffers ask for. Tensors are on the
    target's device where the call moves it. A cache is kept where only the model's own configuration says not to, as
    MPT's checkpoints do, and a static one is called by its usual name.
    """
    settings = request.settings
    values: dict[str, Any] = {
        name: operator.index(v) for name in LENGTHS if (v := settings.arguments.get(name)) is not None
    }
    if "target" in request.config.device_lists:
        device = compat.input_device(model)
        tensors = {name: v for name, v in settings.arguments.items() if isinstance(v, torch.Tensor)}
        values |= {name: value.to(device) for name, value in tensors.items()} | values
    if settings("cache_implementation") in compat.STATIC_NAMES and "cache_implementation" not in left_out:
        values["cache_implementation"] = "static"
    if settings("use_cache") is False and settings.is_own("use_cache"):
        values["use_cache"] = True
    return values


def _left_out_of_cache(model: PreTrainedModel, settings: Settings) -> list[str]:
    """A static cache under autocast, where the model's own configuration keeps none.

    transformers' static layers do not take values of autocast's dtype.
    """
    keeps_none = settings("use_cache") is False and settings.is_own("use_cache")
    is_autocast = keeps_none and torch.is_autocast_enabled(compat.input_device(model).type)
    return ["cache_implementation"] if is_autocast else []


def _stop_strings(model: PreTrainedModel, settings: Settings) -> dict[str, Any]:
    """The criterion of `stop_strings`: transformers loses the tokenizer on the way to a decoding method."""
    if (stop_strings := settings("stop_strings")) is None:
        return {}
    if (tokenizer := settings.arguments.get("tokenizer")) is None:
        remedy = "Pass tokenizer=... as for plain generation."
        raise ConfigError("tokenizer", "must be given with stop_strings", None, remedy)
    criterion = compat.StopStringCriteria(stop_strings=stop_strings, tokenizer=tokenizer)
    criteria = settings.arguments.get("stopping_criteria") or []
    return {"stopping_criteria": compat.merged_criteria(model, criterion, criteria)}
