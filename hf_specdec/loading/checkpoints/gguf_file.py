"""Loads a GGUF file with its weights packed, where the compiled core multiplies them.

transformers names the tensors and undoes what llama.cpp has done to them. It widens them first; here a matrix keeps its
blocks, and its rows are put into the order that transformers gives them. Blocks of other formats are widened.
"""

import importlib.util
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from transformers import PreTrainedModel

from hf_specdec.compat import loading as compat
from hf_specdec.errors import MissingExtraError
from hf_specdec.kernels.packed import FORMATS, Format, interleaved, why_unused
from hf_specdec.kernels.packed_loading import packable, packed_config
from hf_specdec.kernels.quantization.precision import lies_on_cpu

KINDS = {kind.type_id: kind for kind in FORMATS.values()}


def packed_or_arguments(
    auto_class: Any, path: Any, kwargs: dict[str, Any], *, dequantize: bool
) -> tuple[tuple[PreTrainedModel, Any] | None, dict[str, Any]]:
    """A GGUF file's model and transformers' loading info where weights of it can stay packed, and the arguments of
    transformers' `from_pretrained` where they are to be widened, or where it keeps them packed itself.

    Args:
        auto_class: transformers' class that loads it.
        path: a folder, or a name on the hub.
        kwargs: of `from_pretrained`.
        dequantize: whether all weights are to be widened.

    Raises:
        MissingExtraError: the package gguf is not installed.
    """
    file = Path(path, kwargs["gguf_file"]) if "gguf_file" in kwargs else None
    if "quantization_config" in kwargs or file is None:
        return None, kwargs
    can_pack = not dequantize and file.is_file() and lies_on_cpu(kwargs) and why_unused() is None
    if can_pack and (loaded := _load(auto_class, file, kwargs)) is not None:
        return loaded, kwargs
    return None, {**kwargs, **(compat.dequantized_gguf() if dequantize else {})}


def _load(auto_class: Any, file: Path, kwargs: dict[str, Any]) -> tuple[PreTrainedModel, Any] | None:
    """The model and the loading info; `None` where no weight can stay packed."""
    if importlib.util.find_spec("gguf") is None:
        raise MissingExtraError("gguf", "gguf", "a GGUF file")
    from gguf import GGUFReader

    options = {name: value for name, value in kwargs.items() if name not in ("gguf_file", "config", "dtype")}
    dtype = kwargs.get("dtype")
    dtype = dtype if isinstance(dtype, torch.dtype) else torch.bfloat16
    config = kwargs.get("config") or transformers.AutoConfig.from_pretrained(file.parent, gguf_file=file.name)
    with torch.device("meta"):
        skeleton = auto_class.from_config(config)
    reader = GGUFReader(file)
    names, processor = compat.gguf_names(reader, skeleton)
    kinds = _kinds(skeleton, {names[tensor.name]: tensor for tensor in reader.tensors if tensor.name in names})
    if not kinds:
        return None
    state: dict[str, torch.Tensor] = {}
    for tensor in reader.tensors:
        if tensor.name in names:
            _put(state, file, tensor, names, processor, kinds, dtype)
    settings = {"config": config, "state_dict": state, "dtype": dtype, "quantization_config": packed_config(kinds)}
    model, info = type(skeleton).from_pretrained(None, output_loading_info=True, **settings, **options)
    model.config.name_or_path = str(file.parent)
    return model, info


def _kinds(model: PreTrainedModel, tensors: dict[str, Any]) -> dict[str, Format]:
    """The format of each module that can be packed, by the file's `tensors` under transformers' names."""
    allowed = set(packable(model))
    kinds = {
        name.removesuffix(".weight"): KINDS[tensor.tensor_type]
        for name, tensor in tensors.items()
        if tensor.tensor_type in KINDS and name.removesuffix(".weight") in allowed
    }
    for name, source in model.all_tied_weights_keys.items():
        name, source = name.removesuffix(".weight"), source.removesuffix(".weight")
        if name in allowed and source in kinds:
            kinds.setdefault(name, kinds[source])
    return kinds


def _put(
    state: dict[str, torch.Tensor],
    path: Path,
    tensor: Any,
    names: dict[str, str],
    processor: Any,
    kinds: dict[str, Format],
    dtype: torch.dtype,
) -> None:
    """Put a tensor of the file into a state dict: packed, or widened and as transformers has it."""
    from gguf import dequantize

    kind = kinds.get(names[tensor.name].removesuffix(".weight"))
    raw = np.fromfile(path, np.uint8, int(tensor.n_bytes), offset=int(tensor.data_offset))  # a map's pages would stay
    raw = raw.view(tensor.data.dtype).reshape(tensor.data.shape)
    if kind is not None:
        order = row_order(processor, tensor.name, names, len(raw))
        state[names[tensor.name]] = interleaved(torch.from_numpy(raw), kind, order)
        return
    numbers = dequantize(raw, tensor.tensor_type)
    result = processor.process(
        weights=numbers, name=tensor.name, tensor_key_mapping=names, parsed_parameters={"tensors": state}
    )
    if result.name in names:
        state[names[result.name]] = torch.from_numpy(np.ascontiguousarray(result.weights)).to(dtype)


def row_order(processor: Any, name: str, names: dict[str, str], rows: int) -> torch.Tensor | None:
    """The row of a file's matrix that each row of transformers' is; `None` where all keep their places.

    Raises:
        ValueError: transformers changes more than the order of rows.
    """
    probe = np.arange(2 * rows, dtype=np.float64).reshape(rows, 2)
    result = processor.process(weights=probe, name=name, tensor_key_mapping=names, parsed_parameters={"tensors": {}})
    weights = result.weights.T if result.weights.shape == (2, rows) else result.weights  # GPT-2's, which it transposes
    order = (weights[:, 0] / 2).astype(np.int64)
    if not np.array_equal(weights, probe[order]):
        raise ValueError(f"transformers changes the numbers of {name}")
    return None if np.array_equal(order, np.arange(rows)) else torch.from_numpy(order)
