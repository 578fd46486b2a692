"""Loading and enabling in one call.

model = hf_specdec.AutoModelForCausalLM.from_pretrained(path, precision="fp8")
model.generate(**inputs, spec_method="prompt_lookup")
"""

import contextlib
import difflib
import json
import os
import struct
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import torch
import transformers
from safetensors import SafetensorError

from hf_specdec.api.enable import SpecGenerationMixin, enable
from hf_specdec.call.arguments import added_arguments
from hf_specdec.common.files import said_of_hub
from hf_specdec.compat.loading import dropped_settings
from hf_specdec.distributed.placement import parallel_arguments, with_checked_map
from hf_specdec.errors import CheckpointError, ConfigError, SpecError, UnsupportedModelError, first_line, unknown_name
from hf_specdec.kernels.quantization.bnb import prepare
from hf_specdec.kernels.quantization.layers import zero_rows
from hf_specdec.kernels.quantization.precision import (
    DTYPES,
    PRECISIONS,
    dtype_after_widening,
    loading_arguments,
)
from hf_specdec.kernels.quantization.weights import precision_of
from hf_specdec.kernels.xformers import asks_for_xformers, check_installed
from hf_specdec.loading.checkpoints.folder import check_folder, check_kind, with_gguf_file
from hf_specdec.loading.checkpoints.gguf_file import packed_or_arguments
from hf_specdec.loading.published import hint_of

SAME_PRECISION = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}  # torch's names

if TYPE_CHECKING:

    class SpecModel(SpecGenerationMixin, transformers.PreTrainedModel):
        """Type of a loaded model for type checkers: transformers' model whose `generate` takes `spec_method`."""


class _EnabledAutoModel:
    """Base of the two classes below."""

    auto_class: ClassVar[Any]

    def __init__(self) -> None:
        raise TypeError(f"{type(self).__name__} is not instantiated; use {type(self).__name__}.from_pretrained(path).")

    @classmethod
    def from_pretrained(
        cls,
        path: str | os.PathLike[str],
        *,
        precision: str | None = None,
        dequantize: bool = False,
        **kwargs: Any,
    ) -> "SpecModel":
        """Load a checkpoint with transformers and `enable` it.

        Args:
            path (`str`): a folder, a GGUF file, or a name on the Hugging Face hub.
            precision (`str`, *optional*): `"auto"` (the checkpoint's), `"fp32"`, `"bf16"`, `"fp16"`, `"fp8"`, `"int8"`
                or `"nf4"`. Instead of transformers' `dtype` and `quantization_config`. In the last three the linear
                layers are quantised while they are read, and the rest is bf16; fp8 needs torchao, nf4 and int8 on GPUs
                need bitsandbytes. On CPUs int8 quantises embeddings and output layers too.
            dequantize (`bool`, *optional*, defaults to `False`): widen the weights of a GGUF file. On a CPU they stay
                packed otherwise, and `precision` names the dtype of the rest, by default bf16.
            kwargs: what transformers' `from_pretrained` takes but for `output_loading_info`, such as `device_map`,
                `max_memory`, `attn_implementation` (`"xformers"` too) or `quantization_config`. `tp_plan="auto"` shares
                the model between the processes of a `torchrun` launch.

        Raises:
            CheckpointError: the folder is missing, incomplete or damaged.
            ConfigError: a model of another kind, an unknown precision, one that this machine or the checkpoint does not
                have, a `device_map` with a device that is not here, `precision` next to `dtype` or
                `quantization_config`, an argument of `generate`, tensor parallelism next to `device_map` or quantised
                weights, or `attn_implementation="xformers"` for a model that cannot use it.
            MissingExtraError: the precision, or `attn_implementation="xformers"`, needs a package that is missing.
            UnsupportedModelError: the model has no linear layers to quantise.
        """
        precision = SAME_PRECISION.get(str(precision), precision)
        _check_arguments(precision, kwargs)
        path, kwargs = with_gguf_file(path, with_checked_map(kwargs))
        # Set afterwards, so that a model which cannot use it says so instead of failing while it is built.
        attention = kwargs.pop("attn_implementation") if asks_for_xformers(kwargs.get("attn_implementation")) else None
        if attention is not None:
            check_installed()
        gguf_file = kwargs.get("gguf_file") or getattr(kwargs.get("quantization_config"), "gguf_file", None)
        runs_code = bool(kwargs.get("trust_remote_code"))
        check_folder(path, cls.auto_class.__name__, runs_code=runs_code, gguf_file=gguf_file)
        _check_gguf(gguf_file, precision, dequantize)
        with _named_errors(cls.auto_class, path, gguf_file):
            model, info = _loaded(cls.auto_class, path, precision, kwargs, gguf_file, dequantize)
        if missing := sorted(info["missing_keys"]):
            raise CheckpointError(
                f"{os.fspath(path)!r} must hold every weight of {type(model).__name__}, but lacks {len(missing)}, "
                f"{missing[0]!r} among them. Is the download complete, and the class the right one?"
            )
        if precision == "fp8":
            _check_fp8(model)
            zero_rows(model)
        prepare(model)
        _restore_settings(model, path, kwargs)
        enable(model)
        if attention is not None:
            model.set_attn_implementation(attention)
        enabled: SpecModel = model
        return enabled


def _loaded(
    auto_class: Any, path: Any, precision: str | None, kwargs: dict[str, Any], gguf_file: str | None, dequantize: bool
) -> tuple[Any, dict[str, Any]]:
    """The model and transformers' loading info."""
    kwargs = parallel_arguments(loading_arguments(precision, path, kwargs, auto_class))
    cast_to, packed = dtype_after_widening(kwargs), None
    if gguf_file is not None:
        packed, kwargs = packed_or_arguments(auto_class, path, kwargs, dequantize=dequantize)
    model, info = packed or auto_class.from_pretrained(path, output_loading_info=True, **kwargs)
    return (model if cast_to is None else model.to(dtype=cast_to)), info


def _check_arguments(precision: str | None, kwargs: Mapping[str, Any]) -> None:
    """Raise for an unknown precision or dtype, and for arguments of `generate`."""
    if precision is not None and precision not in PRECISIONS:
        raise unknown_name("precision", precision, PRECISIONS)
    _check_dtype(kwargs)
    if "output_loading_info" in kwargs:
        remedy = "Load the model with transformers for it, and enable(model)."
        raise ConfigError("output_loading_info", "must be unset", kwargs["output_loading_info"], remedy)
    for name in added_arguments():
        if name in kwargs:
            remedy = "Pass it to generate, or set model.generation_config.spec_method for all calls."
            raise ConfigError(name, "must be an argument of generate, not of from_pretrained", kwargs[name], remedy)


def _check_gguf(gguf_file: str | None, precision: str | None, dequantize: bool) -> None:
    """Raise for a precision that packed weights cannot have, and for `dequantize` without them."""
    if gguf_file is not None and precision is not None and precision not in DTYPES:
        rule = "must be 'auto', 'fp32', 'bf16' or 'fp16' for a GGUF file, whose weights are packed already"
        raise ConfigError("precision", rule, precision, "Leave it out.")
    if dequantize and gguf_file is None:
        raise ConfigError("dequantize", "must be False for what is no GGUF file", dequantize, "Leave it out.")


def _check_dtype(kwargs: Mapping[str, Any]) -> None:
    """Raise where `dtype` is no dtype of torch, which transformers looks up by name."""
    for name in ("dtype", "torch_dtype"):
        value = kwargs.get(name)
        if isinstance(value, str) and value != "auto" and not isinstance(getattr(torch, value, None), torch.dtype):
            close = difflib.get_close_matches(value, ("auto", *SAME_PRECISION), n=1)
            remedy = f"Did you mean {close[0]!r}?" if close else "Short names such as 'bf16' are for precision."
            raise ConfigError(name, "must be a torch.dtype, the name of one, or 'auto'", value, remedy)


@contextlib.contextmanager
def _named_errors(auto_class: Any, path: str | os.PathLike[str], gguf_file: str | None) -> Iterator[None]:
    """Raises a `CheckpointError` that names the checkpoint for what transformers raises while it reads one."""
    try:
        yield
    except SpecError:
        raise
    except (OSError, SafetensorError, json.JSONDecodeError) as error:
        reason = first_line(error)
        if not Path(path).exists():
            raise CheckpointError(said_of_hub(path, reason) + hint_of(path)) from error
        raise CheckpointError(f"{os.fspath(path)!r} could not be loaded: {reason}") from error
    except (ValueError, struct.error, IndexError) as error:
        if gguf_file is not None:
            file, reason = os.path.join(path, gguf_file), first_line(error)
            raise CheckpointError(f"{file!r} could not be read as GGUF: {reason} Is the download complete?") from error
        if not isinstance(error, ValueError):
            raise
        check_kind(auto_class.__name__, path, error)
        raise


def _check_fp8(model: Any) -> None:
    """Raise an `UnsupportedModelError` where the model has no linear layers but its output layer."""
    if precision_of(model) != "fp8":
        raise UnsupportedModelError(
            f'precision="fp8" needs linear layers, but {type(model).__name__} has none besides its output layer. '
            'Load it with "bf16".'
        )


def _restore_settings(model: Any, path: str | os.PathLike[str], kwargs: dict[str, Any]) -> None:
    """Give the generation configuration the settings of this package that the checkpoint has and loading dropped."""
    names = ("cache_dir", "revision", "subfolder", "token", "local_files_only", "force_download")
    hub_arguments = {name: kwargs[name] for name in names if name in kwargs}
    for name, value in dropped_settings(model.generation_config, os.fspath(path), **hub_arguments).items():
        if name in added_arguments():
            setattr(model.generation_config, name, value)


class AutoModelForCausalLM(_EnabledAutoModel):
    """`transformers.AutoModelForCausalLM` whose models understand `spec_method`."""

    auto_class = transformers.AutoModelForCausalLM


class AutoModelForSeq2SeqLM(_EnabledAutoModel):
    """`transformers.AutoModelForSeq2SeqLM` whose models understand `spec_method`."""

    auto_class = transformers.AutoModelForSeq2SeqLM
