"""transformers' `generate`: the steps that our loop takes over, its own loops, and its settings with ours among them.

Names                              Why
`_sample`                          plain decoding, where a model allows nothing else
`_assisted_decoding`               `engine="assisted"` runs our drafters in transformers' loop
`_prefill`, `_prepare_cache_for_generation`, `_prepare_position_ids_for_generation`,
`_update_model_kwargs_for_generation`, `_mask_length`
                                   the prompt's forward with all of `generate`'s rules (multimodal inputs, embeddings,
                                   continued caches, chunks) is transformers' own
`_merge_criteria_processor_list`   a stop string's criterion gives way to one that the user made, as in `generate`
`_eos_token_tensor`, `_pad_token_tensor`
                                   the tokens that end and pad a text, as `generate` has settled them
`TransformersKwargs`               arguments that every forward takes without naming them
"""

import copy
import functools
import inspect
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from types import FunctionType
from typing import Any, cast

import torch
from transformers import (
    GenerationConfig,
    GenerationMixin,
    LogitsProcessor,
    LogitsProcessorList,
    PreTrainedModel,
    StoppingCriteria,
    StoppingCriteriaList,
    cache_utils,
)
from transformers.cache_utils import DummyLayer, DynamicLayer, DynamicSlidingWindowLayer, StaticCache
from transformers.generation import GenerationMode
from transformers.modeling_outputs import BaseModelOutput
from transformers.utils import ModelOutput as ModelOutput
from transformers.utils import TransformersKwargs

from hf_specdec.compat.caches import CACHE, CACHE_NAMES
from hf_specdec.compat.devices import input_device
from hf_specdec.compat.models import text_config

# What `_prepares_alike` allows for: names that a class reads, and arguments that it sets.
PASSED_ON = {"super", "prepare_inputs_for_generation", "config", "num_logits_to_keep"}
SET_ALIKE = {"logits_to_keep", "attention_mask"}
INPUT_METHODS = ("prepare_inputs_for_generation", "_update_model_kwargs_for_generation")
PROCESSORS_MODULE = LogitsProcessor.__module__  # of transformers' own logits processors
Process = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
HOMES = ("transformers.", "peft.", "hf_specdec.")  # whose code goes on linearly, or is known here


def keep_own_settings(generation_config: GenerationConfig) -> bool:
    """Let settings that transformers does not know survive saving and loading; returns whether that had to be set.

    Where a configuration was made from the model's own, loading it drops them; nothing else depends on that mark.
    """
    was_marked = bool(generation_config._from_model_config)
    if was_marked:
        generation_config._from_model_config = False
    return was_marked


def leave_own_settings(generation_config: GenerationConfig) -> None:
    """Undo `keep_own_settings`."""
    generation_config._from_model_config = True


def without_settings(generation_config: GenerationConfig, names: Iterable[str]) -> GenerationConfig:
    """The configuration, or a copy without these settings where it has one of them."""
    names_there = [name for name in names if hasattr(generation_config, name)]
    if not names_there:
        return generation_config
    config = copy.copy(generation_config)
    for name in names_there:
        delattr(config, name)
    return config


def is_assistants_call(kwargs: Mapping[str, Any]) -> bool:
    """Returns whether transformers' own assisted decoding asks a model for drafts by these arguments of `generate`."""
    return bool(getattr(kwargs.get("generation_config"), "is_assistant", False))


def accepted_arguments(model: PreTrainedModel) -> set[str]:
    """Arguments of the model's `generate` and forward, and settings of a generation configuration."""
    functions = [model.__class__.generate, GenerationMixin.generate, model.forward, model.prepare_inputs_for_generation]
    if model.config.is_encoder_decoder:
        functions.append(model.get_encoder().forward)
    names = {name for function in functions for name in inspect.signature(function).parameters}
    names |= {name for name in vars(GenerationConfig()) if not name.startswith("_")}
    names |= set(TransformersKwargs.__annotations__)
    return names | {"tokenizer", "assistant_tokenizer", "input_ids", "inputs", "inputs_embeds"}


@dataclass
class Encoded(BaseModelOutput):
    """Encoder output; some decoders read its mask."""

    attention_mask: torch.Tensor | None = None


def fresh_cache(model: PreTrainedModel, batch_size: int = 1) -> dict[str, Any]:
    """The cache that `generate` would begin with, under its name; nothing where the model makes its own."""
    kwargs: dict[str, Any] = {}
    model._prepare_cache_for_generation(GenerationConfig(), kwargs, GenerationMode.GREEDY_SEARCH, batch_size, 0)
    return kwargs


def has_own_loop(model: PreTrainedModel) -> bool:
    """True if the model's class decodes by a loop of its own, as Higgs Audio's: a step's logits may be of any form."""
    return type(model)._sample is not GenerationMixin._sample


def attends_only(model: PreTrainedModel) -> bool:
    """Returns whether the model's cache consists of transformers' own attention layers."""
    kinds = (DynamicLayer, DynamicSlidingWindowLayer, DummyLayer)
    return all(type(layer) in kinds for layer in getattr(fresh_cache(model).get(CACHE), "layers", []))


def has_own_cache(model: PreTrainedModel) -> bool:
    """Returns whether the model's cache has layers that the model's own file defines."""
    layers = getattr(fresh_cache(model).get(CACHE), "layers", [])
    return any(type(layer).__module__ != cache_utils.__name__ for layer in layers)


def unbounded_layers(cache: StaticCache, model: PreTrainedModel) -> list[Any]:
    """The layers that `cache` would have if it were longer than any text: what bounds them is the model's window."""
    layers: list[Any] = StaticCache(config=text_config(model.config), max_cache_len=1 << 40).layers
    return layers if len(layers) == len(cache.layers) else cache.layers


def own_positions(model: PreTrainedModel, input_ids: torch.Tensor, model_kwargs: dict[str, Any]) -> torch.Tensor:
    """The `position_ids` that `generate` makes for a prompt; some models count in several dimensions."""
    return cast("torch.Tensor", model._prepare_position_ids_for_generation(input_ids, model_kwargs))


def prompt_length(input_ids: torch.Tensor, generation_config: GenerationConfig, model_kwargs: dict[str, Any]) -> int:
    """Tokens that the cache holds once the prompt is read, those of earlier turns counted."""
    mask = model_kwargs.get("attention_mask")
    length = mask.shape[1] if isinstance(mask, torch.Tensor) else getattr(generation_config, "_mask_length", 0)
    return max(int(length), input_ids.shape[1])


def end_tokens(generation_config: GenerationConfig) -> torch.Tensor | None:
    """`(E,)` ids that end a text, inside `generate`; `None` where none does."""
    tokens: torch.Tensor | None = getattr(generation_config, "_eos_token_tensor", None)
    return tokens


def pad_token_id(generation_config: GenerationConfig) -> int:
    """The id that stands where a row has no token, inside `generate`."""
    token = getattr(generation_config, "_pad_token_tensor", None)
    return 0 if token is None else int(token)


def has_own_input_preparation(model: PreTrainedModel) -> bool:
    """Returns whether the model's class prepares its inputs itself, so that each forward has to ask it."""
    prepare = type(model).prepare_inputs_for_generation
    return (
        not (prepare is GenerationMixin.prepare_inputs_for_generation or _prepares_alike(prepare))
        or "prepare_inputs_for_generation" in vars(model)
        or model.is_remote_code()
    )


def has_foreign_inputs(model: PreTrainedModel) -> bool:
    """Returns whether code from outside of transformers prepares inputs of forwards, in the class or on the model."""
    methods = (vars(model).get(name) or getattr(type(model), name) for name in INPUT_METHODS)
    functions = (getattr(method, "__func__", method) for method in methods)
    return not all(getattr(function, "__globals__", {}).get("__name__", "").startswith(HOMES) for function in functions)


@functools.cache
def _prepares_alike(prepare: Callable[..., Any]) -> bool:
    """True if a class of transformers asks its base, and sets what is the same in each forward after the prompt's."""
    function = inspect.unwrap(prepare)
    if not isinstance(function, FunctionType) or not function.__module__.startswith("transformers."):
        return False
    constants = {value for value in function.__code__.co_consts if isinstance(value, str)} - {function.__doc__}
    return set(function.__code__.co_names) <= PASSED_ON and bool(constants) and constants <= SET_ALIKE


def prefill(
    model: PreTrainedModel, input_ids: torch.Tensor, generation_config: GenerationConfig, model_kwargs: dict[str, Any]
) -> Any:
    """The prompt's forward, by transformers' rules; returns the model's output."""
    return model._prefill(input_ids, generation_config, model_kwargs)


def updated_kwargs(
    model: PreTrainedModel, outputs: Any, model_kwargs: dict[str, Any], *, num_new_tokens: int = 1
) -> dict[str, Any]:
    """`model_kwargs` after more tokens: masks, positions and token types extended by them.

    A cache under another name than the one that the model has written is left out: RWKV takes one and ignores it.
    """
    kwargs: dict[str, Any] = model._update_model_kwargs_for_generation(
        outputs, model_kwargs, is_encoder_decoder=model.config.is_encoder_decoder, num_new_tokens=num_new_tokens
    )
    written = next((name for name in CACHE_NAMES if outputs.get(name) is not None), None)
    ignored = set() if written is None else set(CACHE_NAMES) - {written}
    return {name: value for name, value in kwargs.items() if name not in ignored}


def merged_criteria(model: PreTrainedModel, criterion: StoppingCriteria, criteria: Any) -> StoppingCriteriaList:
    """The criteria of a call, with one that `generate` makes before them; where they have its class, without it."""
    return cast(
        "StoppingCriteriaList", model._merge_criteria_processor_list(StoppingCriteriaList([criterion]), criteria)
    )


def sample(model: PreTrainedModel, input_ids: torch.Tensor, **kwargs: Any) -> Any:
    """transformers' own greedy search or sampling."""
    return type(model)._sample(model, input_ids, **kwargs)


def assisted_decoding(model: PreTrainedModel, candidate_generator: Any, input_ids: torch.Tensor, **kwargs: Any) -> Any:
    """transformers' own assisted decoding, with `candidate_generator` as its source of candidates."""
    return type(model)._assisted_decoding(_WithCandidates(model, candidate_generator), input_ids, **kwargs)


class _WithCandidates:
    """Stands in for the model inside the assisted loop: the same in everything but where candidates come from."""

    def __init__(self, model: PreTrainedModel, candidate_generator: Any) -> None:
        self._model, self._candidate_generator = model, candidate_generator

    def _get_candidate_generator(self, **kwargs: Any) -> Any:
        return self._candidate_generator

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._model(*args, **kwargs)

    @property
    def device(self) -> torch.device:
        return input_device(self._model)  # the model's own is `meta` where its embeddings are offloaded

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)


def in_order(processors: LogitsProcessorList) -> Process:
    """Applies the processors in order, as `processors(input_ids, scores)` does, for many calls.

    A `LogitsProcessorList` looks at the signature of each processor in every call, some 50 microseconds each. Here that
    is done once. A list that needs more than ids and scores, or is a class of its own, stays what it is.
    """
    try:
        takes_two = all(len(inspect.signature(processor.__call__).parameters) <= 2 for processor in processors)
    except (TypeError, ValueError):  # no signature: the list raises at its first call, as in plain decoding
        takes_two = False
    if type(processors) is not LogitsProcessorList or not takes_two:
        return cast("Process", processors)

    def call(input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        for processor in processors:
            scores = processor(input_ids, scores)
        return scores

    return call
