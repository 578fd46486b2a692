"""Every name of transformers that loading needs and that may move, each with its reason.

    Names                       Why
    `get_keys_to_not_convert`   the layers that transformers leaves alone, which a list of one's own replaces
    `Conv1D`                    GPT-2's linear layer, whose weight is transposed
    `GgufConfig`                new in 5.24, which keeps the weights of a GGUF file packed without it
    `gguf_names`                its tensors' names and what llama.cpp has changed in them are said nowhere else
    `tqdm`                      the bar of a GGUF file's tensors heeds no setting of transformers
    `HfQuantizer`, `register`   weights are packed while transformers reads a checkpoint, a tensor at a time
    `ConversionOps`             the operation on one tensor of a checkpoint
    `_keep_in_fp32_modules`     modules that a model's author wants left alone
    `cached_file`               what is ours is found where transformers finds models: folder, cache or hub
    `validate_repo_id`          a name that is none is refused before anything is written under it
    `embed_scale`               of embeddings that multiply what they look up: their classes share no base

Tried with transformers 5.23 and 5.24.
"""

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import transformers
from huggingface_hub.utils import validate_repo_id as validate_repo_id  # type: ignore[attr-defined]
from torch import nn
from transformers import GenerationConfig, PreTrainedModel, logging
from transformers.core_model_loading import ConversionOps as ConversionOps
from transformers.pytorch_utils import Conv1D as Conv1D
from transformers.quantizers import HfQuantizer as HfQuantizer
from transformers.quantizers import auto
from transformers.quantizers.base import get_keys_to_not_convert as get_keys_to_not_convert
from transformers.utils import cached_file as cached_file
from transformers.utils.quantization_config import QuantizationConfigMixin as QuantizationConfigMixin


def register(method: str, config: type[QuantizationConfigMixin], quantizer: type[HfQuantizer]) -> None:
    """Make a quantisation method known to transformers, once; no existing one is replaced."""
    auto.AUTO_QUANTIZATION_CONFIG_MAPPING.setdefault(method, config)
    auto.AUTO_QUANTIZER_MAPPING.setdefault(method, quantizer)


def keep_in_full_precision(model: PreTrainedModel) -> tuple[str, ...]:
    """Parts of module names that the model's author wants left in full precision."""
    names = (getattr(model, "_keep_in_fp32_modules", None), getattr(model, "_keep_in_fp32_modules_strict", None))
    return tuple(sorted({name for group in names for name in group or ()}))


def is_embedding(module: object) -> bool:
    """Returns whether a module is an embedding that looks rows up and does no more than multiply them."""
    return isinstance(module, nn.Embedding) and (
        type(module) is nn.Embedding or type(module).__name__.endswith("ScaledWordEmbedding")
    )


def embedding_scale(module: Any, dtype: torch.dtype) -> float | None:
    """Factor of an embedding's rows in a dtype; those of Gemma round it first."""
    scale: Any = getattr(module, "embed_scale", None)
    if isinstance(scale, torch.Tensor):
        return float(torch.tensor(module.scalar_embed_scale, dtype=dtype, device="cpu"))
    return None if scale is None else float(scale)


def reads_output_dtype(model: PreTrainedModel) -> bool:
    """Returns whether a model casts what it multiplies with the output layer to the dtype of that layer's weight."""
    return model.config.model_type in ("falcon_mamba", "fsmt", "hy_v4", "mamba", "mamba2", "xlstm")


def tied_names(model: PreTrainedModel) -> set[str]:
    """Names of parameters that share their storage with another one's."""
    tied = model.all_tied_weights_keys
    return {*tied.keys(), *tied.values()}


def dequantized_gguf() -> dict[str, Any]:
    """Arguments of `from_pretrained` that dequantise a GGUF file, as transformers 5.23 always does."""
    config = getattr(transformers, "GgufConfig", None)
    return {} if config is None else {"quantization_config": config(dequantize=True)}


@contextlib.contextmanager
def without_progress_bars() -> Iterator[None]:
    """Hides transformers' progress bars of a checkpoint that is loaded."""
    from transformers import modeling_gguf_pytorch_utils as gguf

    is_shown, bar = logging.is_progress_bar_enabled(), gguf.tqdm
    logging.disable_progress_bar()
    gguf.tqdm = logging.tqdm
    try:
        yield
    finally:
        gguf.tqdm = bar
        if is_shown:
            logging.enable_progress_bar()


def gguf_names(reader: Any, model: PreTrainedModel) -> tuple[dict[str, str], Any]:
    """transformers' names of a GGUF file's tensors, where it says them, and what undoes llama.cpp's changes."""
    from transformers import modeling_gguf_pytorch_utils as gguf

    architecture = gguf.read_field(reader, "general.architecture")[0]
    processor = gguf.TENSOR_PROCESSORS.get(architecture, gguf.TensorProcessor)(config=model.config.to_dict())
    # As `model` without the modules inside, for each of which transformers makes a table of all names.
    alone = SimpleNamespace(config=model.config, state_dict=model.state_dict, named_children=tuple)
    try:
        names = gguf.get_gguf_hf_weights_map(alone, processor)
        if not {tensor.name for tensor in reader.tensors} <= names.keys():  # a file of the model inside
            names = gguf.get_gguf_hf_weights_map(model, processor)
    except NotImplementedError:  # it has another way for this architecture
        return {}, processor
    return names, processor


def dropped_settings(generation_config: GenerationConfig, path: str, **hub_arguments: Any) -> dict[str, Any]:
    """Settings in a checkpoint's generation configuration that loading it dropped."""
    try:
        file = cached_file(path, "generation_config.json", **hub_arguments)
        saved = json.loads(Path(file).read_text("utf-8"))
    except (OSError, ValueError):  # there is none that could be read
        return {}
    if not isinstance(saved, dict) or not saved.get("_from_model_config"):
        return {}
    return {name: value for name, value in saved.items() if not hasattr(generation_config, name)}
