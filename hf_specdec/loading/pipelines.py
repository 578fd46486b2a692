"""`transformers.pipeline("text-generation")` whose texts are written with speculative decoding.

pipe = hf_specdec.pipeline(model="path/to/model")
pipe("def main():", max_new_tokens=64)[0]["generated_text"]
pipe.spec_stats.mean_acceptance_length
"""

import os
from collections.abc import Mapping
from typing import Any

import torch
import transformers
from transformers import TextGenerationPipeline

from hf_specdec.api.enable import enable
from hf_specdec.call.arguments import AUTO, check_method, merged_arguments
from hf_specdec.common.stats import SpecStats
from hf_specdec.compat import generation_model
from hf_specdec.distributed.placement import read_device
from hf_specdec.errors import ConfigError
from hf_specdec.loading.auto import AutoModelForCausalLM
from hf_specdec.loading.checkpoints.tokenizers import draft_tokenizers, load_tokenizer
from hf_specdec.loading.drafts import load_draft

TASK = "text-generation"
PATHS = (str, os.PathLike)  # of a folder, or a name on the hub
DTYPES = ("dtype", "torch_dtype")  # what `transformers.pipeline` hands to `from_pretrained`
HUB = ("revision", "token", "trust_remote_code")  # what it hands to all loading


class SpecTextGenerationPipeline(TextGenerationPipeline):
    """`TextGenerationPipeline` that keeps what its last call drafted and accepted.

    Attributes:
        spec_stats (`SpecStats | None`): of the last call of the model; `None` where that was plain generation, or a
            batch without `return_dict_in_generate=True`, which keeps the cache of rows that have ended.
    """

    spec_stats: SpecStats | None = None

    def __init__(self, *args: Any, assistant_model: Any = None, assistant_tokenizer: Any = None, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)  # without the draft: the base class takes models with a vocabulary only
        drafts: dict[str, Any] = {"assistant_model": assistant_model}
        if isinstance(assistant_model, PATHS):
            draft = load_draft(assistant_model, target=self.model).to(device=self.model.device, dtype=self.model.dtype)
            drafts = {"assistant_model": draft, **draft_tokenizers(draft, assistant_model, self.tokenizer)}
        if assistant_tokenizer is not None:
            drafts |= {"tokenizer": self.tokenizer, "assistant_tokenizer": assistant_tokenizer}
        self._forward_params |= {name: value for name, value in drafts.items() if value is not None}

    def _sanitize_parameters(self, **kwargs: Any) -> Any:
        """As the base class; a call's own method leaves the pipeline's configuration and draft aside."""
        preprocess, forward, postprocess = super()._sanitize_parameters(**kwargs)
        if (usual := getattr(self, "_forward_params", None)) is not None:  # none yet while the pipeline is made
            together = merged_arguments(generation_model(self.model), usual, forward)
            names = usual.keys() | ({"spec_method"} & together.keys())
            forward |= {name: together.get(name) for name in names if name not in forward}
        return preprocess, forward, postprocess

    def _forward(self, model_inputs: Any, **generate_kwargs: Any) -> Any:
        """As the base class, with its call of `generate` watched."""

        def generate(**kwargs: Any) -> Any:
            is_asked = bool(kwargs.get("return_dict_in_generate"))
            ids = kwargs.get("input_ids")
            is_one = isinstance(ids, torch.Tensor) and len(ids) == 1 and kwargs.get("spec_method", ...) is not None
            output = self.model.generate(**kwargs | ({"return_dict_in_generate": True} if is_one else {}))
            self.spec_stats = getattr(output, "spec_stats", None)
            return output.sequences if is_one and not is_asked else output

        watched = _StandIn(self, model=_StandIn(self.model, generate=generate))
        return TextGenerationPipeline._forward(watched, model_inputs, **generate_kwargs)  # noqa: SLF001 - our base


class _StandIn:
    """An object with some of its attributes replaced, for one call."""

    def __init__(self, target: Any, **attributes: Any) -> None:
        self.__dict__.update(attributes, _target=target)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._target, name)


def pipeline(
    task: str = TASK,
    model: Any = None,
    *,
    tokenizer: Any = None,
    precision: str | None = None,
    model_kwargs: Mapping[str, Any] | None = None,
    **kwargs: Any,
) -> SpecTextGenerationPipeline:
    """A text-generation pipeline with `spec_method`; the model need not be enabled.

    Args:
        task (`str`, *optional*, defaults to `"text-generation"`): the only one here. For another task `enable` the
            model and give it to `transformers.pipeline` with `spec_method`.
        model (`PreTrainedModel`, `str` or `PathLike`): a model, a folder, or a name on the hub.
        tokenizer (`PreTrainedTokenizerBase`, `str` or `PathLike`, *optional*): by default the model's.
        precision (`str`, *optional*): of a model given by folder or name, see `AutoModelForCausalLM.from_pretrained`.
        model_kwargs (`dict`, *optional*): for `from_pretrained`, of a model given by folder or name. As in
            `transformers.pipeline`, `dtype`, `revision`, `token` and `trust_remote_code` may be given outside of it.
        kwargs: everything else that `transformers.pipeline` takes, such as `device` and `batch_size`, and arguments of
            `generate` for every call: `spec_method` (by default the method of a list form, or that of the model's
            generation configuration, or `"auto"`), `spec_config`, `lookahead_config`, `assistant_model` (a model, a
            draft head, or the folder or name of one)... A call may name others; its own method leaves configuration
            and draft of the pipeline aside.

    Raises:
        CheckpointError: the model or its tokenizer is missing or damaged.
        ConfigError: another task, no model, an unknown method or a wrong configuration of it, a device that is not
            here, or options of loading next to a loaded model.
    """
    if task != TASK:
        remedy = "Use transformers.pipeline(task, model=hf_specdec.enable(model), ...)(..., spec_method=...)."
        raise ConfigError("task", f'must be "{TASK}"', task, remedy)
    if model is None:
        raise ConfigError("model", "must be given", None, "Pass a model, a folder or a name on the hub.")
    check_method(kwargs)
    if kwargs.get("device") not in (None, -1):  # transformers' -1 is the CPU
        read_device(kwargs["device"], "device")
    dtypes = {option: kwargs.pop(option) for option in DTYPES if kwargs.get(option) is not None}
    hub = {option: kwargs[option] for option in HUB if kwargs.get(option) is not None}
    if isinstance(model, PATHS):
        name = model
        loading = {"precision": precision, **dtypes, **hub, **(model_kwargs or {})}
        loaded = AutoModelForCausalLM.from_pretrained(name, **loading)
    else:
        options = {"precision": precision, "model_kwargs": model_kwargs, **dtypes}
        if (option := next((key for key, value in options.items() if value is not None), None)) is not None:
            raise ConfigError(option, "must be unset for a loaded model", options[option], "Load the model with it.")
        loaded, name = enable(model), model.config.name_or_path
    tokenizer = name if tokenizer is None else tokenizer
    made: SpecTextGenerationPipeline = transformers.pipeline(
        task,
        model=loaded,
        tokenizer=load_tokenizer(tokenizer, **hub) if isinstance(tokenizer, PATHS) else tokenizer,
        pipeline_class=SpecTextGenerationPipeline,
        **{"spec_method": AUTO, **kwargs},
    )
    return made
