"""The names that transformers' `generate` takes, which it checks only call by call.

Names                        Why
`TransformersKwargs`         arguments that every forward takes without naming them
"""

import inspect

from transformers import GenerationConfig, GenerationMixin, PreTrainedModel
from transformers.utils import TransformersKwargs


def known_settings(model: PreTrainedModel) -> set[str]:
    """Arguments of the model's `generate` and forward, and settings of a generation configuration."""
    functions = [model.__class__.generate, GenerationMixin.generate, model.forward, model.prepare_inputs_for_generation]
    if model.config.is_encoder_decoder:
        functions.append(model.get_encoder().forward)
    names = {name for function in functions for name in inspect.signature(function).parameters}
    names |= {name for name in vars(GenerationConfig()) if not name.startswith("_")}
    names |= set(TransformersKwargs.__annotations__)
    return names | {"tokenizer", "assistant_tokenizer", "input_ids", "inputs", "inputs_embeds"}
