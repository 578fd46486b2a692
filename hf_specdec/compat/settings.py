"""Settings of generation: those that transformers knows, and ours, saved and loaded with its own.

Names                        Why
`TransformersKwargs`         arguments that every forward takes without naming them
"""

import copy
import inspect
from collections.abc import Iterable, Mapping
from typing import Any

from transformers import GenerationConfig, GenerationMixin, PreTrainedModel
from transformers.utils import TransformersKwargs


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
