"""From a user's arguments of `generate` to those that transformers' `generate` gets: checks, and what it would lose."""

import copy
import inspect
import operator
from collections.abc import Callable, Mapping
from typing import Any

import torch
from transformers import GenerationConfig, GenerationMixin, PreTrainedModel

from hf_specdec import compat
from hf_specdec.compat.rotary import position_limit
from hf_specdec.distributed.placement import is_placed, move, move_pair, read_devices
from hf_specdec.engine.head_pairing import place_head
from hf_specdec.errors import ConfigError
from hf_specdec.methods.common.config import SpecConfig
from hf_specdec.methods.common.draft_head import DraftHead

STATIC_NAMES = ("hybrid_chunked", "sliding_window")  # what older checkpoints call a static cache with windows
CACHES = (None, "dynamic", "static", "hybrid", *STATIC_NAMES)  # transformers takes "hybrid" for no choice
LENGTHS = ("max_new_tokens", "max_length", "min_new_tokens", "min_length")
Settings = Callable[[str], Any]


def named_arguments(function: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """All arguments under the names that `function` gives them, the cache under its new one.

    Raises:
        TypeError: one is given by position and by name.
    """
    parameters = inspect.signature(function).parameters
    if any(p.kind is p.VAR_POSITIONAL for p in parameters.values()):
        function = GenerationMixin.generate
        args = (None, *args)
    named = dict(inspect.signature(function).bind_partial(*args).arguments)
    named.pop("self", None)
    if doubled := named.keys() & kwargs.keys():
        raise TypeError(f"generate() got multiple values for argument {min(doubled)!r}")
    return compat.under_new_name({**named, **kwargs})


def settings_of(kwargs: Mapping[str, Any], configs: list[GenerationConfig]) -> Settings:
    """How a generation setting will come out: arguments first, then the configurations in their order."""

    def value(name: str) -> Any:
        if name in kwargs:
            return kwargs[name]
        return next((v for v in (getattr(config, name, None) for config in configs) if v is not None), None)

    return value


def check_modes(settings: Callable[[str], Any], kwargs: Mapping[str, Any]) -> None:
    """Refuse decoding modes that have no speculative form.

    Args:
        settings: gives the value a generation setting will have in this call, `None` where it is unset.
        kwargs: the other arguments of `generate`.
    """
    plain = "Pass spec_method=None for this call."

    def refuse(name: str, rule: str, instead: object) -> None:
        given = f"A generation configuration sets it: pass {name}={instead!r}, or change it there."
        remedy = plain if name in kwargs else f"{given} Or pass spec_method=None."
        raise ConfigError(name, f"must be {rule}", settings(name), remedy)

    for name in LENGTHS:
        if settings(name) is not None and not _is_whole(settings(name)):
            remedy = "Write 64, without quotes or a decimal point."
            raise ConfigError(name, "must be a whole number", settings(name), remedy)
    if (settings("num_beams") or 1) > 1:
        refuse("num_beams", "1 with spec_method (beam search has no speculative form)", 1)
    if settings("use_cache") is False:
        remedy = "Pass use_cache=True. Or pass spec_method=None."
        raise ConfigError("use_cache", "must be True with spec_method", False, remedy)
    for name in ("penalty_alpha", "dola_layers", "constraints", "force_words_ids", "token_healing"):
        if settings(name):
            refuse(name, "unset with spec_method", None)
    if settings("output_attentions") and not settings("return_token_timestamps"):  # Whisper sets one for the other
        refuse("output_attentions", "False with spec_method (attention over a tree is not the text's)", False)
    if settings("cache_implementation") not in CACHES:
        refuse("cache_implementation", 'unset, "dynamic" or "static" with spec_method', "dynamic")
    if (assistant := kwargs.get("assistant_model")) is not None:
        method = assistant.methods[0] if isinstance(assistant, DraftHead) else "draft_model"
        remedy = f'Use spec_method="{method}" or "auto", which draft with it. Or pass spec_method=None.'
        raise ConfigError("assistant_model", "must be unset with this spec_method", type(assistant).__name__, remedy)
    if kwargs.get("synced_gpus"):
        raise ConfigError("synced_gpus", "must be False with spec_method", True, plain)


def _is_whole(value: Any) -> bool:
    """Whether Python takes it as an integer, as it does a tensor of one."""
    try:
        operator.index(value)
    except TypeError:
        return False
    return True


def with_whole_lengths(kwargs: dict[str, Any]) -> None:
    """Make lengths of the call integers of Python: NumPy's and tensors have no `bit_length`, which buffers ask for."""
    for name in LENGTHS:
        if kwargs.get(name) is not None:
            kwargs[name] = operator.index(kwargs[name])


def with_cache(model: PreTrainedModel, kwargs: dict[str, Any]) -> None:
    """Keep a cache in this call where only the model's own configuration says not to, as MPT's checkpoints do.

    Under autocast it is a dynamic one: transformers' static layers do not take values of autocast's dtype. A static
    cache is called by its usual name.
    """
    configs = [config for config in (kwargs.get("generation_config"), model.generation_config) if config is not None]
    if settings_of(kwargs, configs)("cache_implementation") in STATIC_NAMES:
        kwargs["cache_implementation"] = "static"
    given = getattr(kwargs.get("generation_config"), "use_cache", None)
    if "use_cache" not in kwargs and given is not False and model.generation_config.use_cache is False:
        kwargs["use_cache"] = True
        if torch.is_autocast_enabled(compat.input_device(model).type):
            unset(model, kwargs, "cache_implementation")


def check_prompt(model: PreTrainedModel, kwargs: Mapping[str, Any], *, of_decoder: bool = False) -> None:
    """Refuse prompts that the model cannot read, before anything is computed.

    Args:
        of_decoder: whether the decoder reads the ids, where the model has an encoder.
    """
    ids = kwargs["inputs"] if kwargs.get("inputs") is not None else kwargs.get("input_ids")
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
        if kwargs.get("inputs_embeds") is None:
            raise ConfigError("input_ids", "must hold at least one token", tuple(ids.shape), "Put one in the prompt.")
        return
    largest, smallest = int(ids.max()), int(ids.min())
    rows = compat.num_embeddings(model, of_decoder=of_decoder)
    if smallest < 0 or (rows is not None and largest >= rows):
        raise ConfigError(
            "input_ids",
            f"must be at least 0 and below {rows} (the tokens that the model embeds)",
            smallest if smallest < 0 else largest,
            "Use the model's own tokenizer.",
        )
    positions = None if model.config.is_encoder_decoder else position_limit(model, reach=ids.shape[1])
    if positions is not None:
        raise ConfigError(
            "input_ids",
            f"must be at most {positions} tokens long (the model's max_position_embeddings)",
            ids.shape[1],
            "Shorten the prompt, or use a model with more positions.",
        )


def place_models(
    model: PreTrainedModel, draft: PreTrainedModel | DraftHead | None, config: SpecConfig, kwargs: dict[str, Any] | None
) -> None:
    """Put the models where the configuration's device lists say, and the call's tensors beside the target.

    A draft head without a list goes where the target reads its inputs.

    Args:
        kwargs: arguments of `generate`; `None` where the call has begun, so that the target cannot be moved any more.

    Raises:
        ConfigError: a device that is not here, or a model that cannot be put there.
    """
    lists = config.device_lists
    target_devices, field = lists.get("target"), config.device_fields.get("target", "")
    if target_devices is not None and kwargs is None and not is_placed(model, read_devices(target_devices, field)):
        remedy = "Enable the model, so that generate moves it, or move it first."
        raise ConfigError(field, "must name where the target is with custom_generate", target_devices, remedy)
    if isinstance(draft, DraftHead):
        place_head(draft, model, config)
        draft = None
    if draft is not None:
        move_pair(model, draft, target_devices=target_devices, draft_devices=lists.get("draft"))
    elif target_devices is not None:
        move(model, target_devices, field)
    if target_devices is not None and kwargs is not None:
        device = compat.input_device(model)
        kwargs.update({name: value.to(device) for name, value in kwargs.items() if isinstance(value, torch.Tensor)})


def bind_stop_strings(model: PreTrainedModel, kwargs: dict[str, Any]) -> None:
    """transformers loses the tokenizer on the way to a custom method, so the criterion is made here."""
    tokenizer = kwargs.pop("tokenizer", None)
    given = kwargs.get("generation_config")
    stop_strings = settings_of(kwargs, [c for c in (given, model.generation_config) if c is not None])("stop_strings")
    if stop_strings is None:
        return
    if tokenizer is None:
        raise ConfigError(
            "tokenizer", "must be given with stop_strings", None, "Pass tokenizer=... as for plain generation."
        )
    criterion = compat.StopStringCriteria(stop_strings=stop_strings, tokenizer=tokenizer)
    kwargs["stopping_criteria"] = compat.merged_criteria(model, criterion, kwargs.get("stopping_criteria") or [])
    unset(model, kwargs, "stop_strings")


def unset(model: PreTrainedModel, kwargs: dict[str, Any], name: str) -> None:
    """Make a generation setting `None` for this call, wherever it comes from; the caller's objects stay as they are."""
    kwargs.pop(name, None)
    given = kwargs.get("generation_config")
    if getattr(given, name, None) is not None:
        kwargs["generation_config"] = copy.deepcopy(given)
        setattr(kwargs["generation_config"], name, None)
    if getattr(model.generation_config, name, None) is not None:
        kwargs[name] = None  # an argument wins over the model's default


def prompt_length(model: PreTrainedModel, kwargs: Mapping[str, Any]) -> int:
    """Tokens in front of the new ones in the output of `generate`."""
    names = ("decoder_input_ids",) if model.config.is_encoder_decoder else ("inputs", "input_ids")
    given = next((kwargs[name] for name in names if kwargs.get(name) is not None), None)
    return int(model.config.is_encoder_decoder) if given is None else int(given.shape[1])
