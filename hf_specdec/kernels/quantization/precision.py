"""Precisions: what this machine can do, what a checkpoint allows, and the arguments that ask transformers for it."""

import copy
import functools
import importlib.util
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch
import transformers

from hf_specdec.distributed.placement import default_device
from hf_specdec.errors import ConfigError, MissingExtraError, unknown_name
from hf_specdec.kernels.quantization.bnb import bnb_config, is_installed, load_bitsandbytes
from hf_specdec.kernels.quantization.fp8 import METHOD, fp8_config, saved_here
from hf_specdec.kernels.quantization.fp8_linear import MIN_CAPABILITY, multiplies_fp8

DTYPES: Mapping[str, torch.dtype | str] = MappingProxyType(
    {"auto": "auto", "fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
)
FROM_BNB = ("int8", "nf4")
PRECISIONS = (*DTYPES, "fp8", *FROM_BNB)
OTHER_NAMES = ("dtype", "torch_dtype", "quantization_config")  # of transformers, for the same thing
PARALLEL = ("tp_plan", "tp_size", "distributed_config")
# Formats that transformers can turn into ordinary weights while it reads them.
DEQUANTISED = ("fp8", "compressed-tensors")
HUB_ARGUMENTS = ("cache_dir", "force_download", "local_files_only", "token", "revision", "subfolder", "proxies")


@dataclass(frozen=True, slots=True)
class Support:
    """Returns whether this machine can load a precision, and how, or what it lacks."""

    precision: str
    works: bool
    reason: str


def machine_support() -> list[Support]:
    """Every precision but `"auto"`, with the reason."""
    found = [Support(name, True, "torch") for name in DTYPES if name != "auto"]
    found.append(Support("fp8", True, fp8_backend(default_device())))
    return found + [_bnb_support(name) for name in FROM_BNB]


def fp8_backend(device: torch.device) -> str:
    """Describes how FP8 weights are multiplied on a device, and why."""
    needed = ".".join(map(str, MIN_CAPABILITY))
    if multiplies_fp8(device):
        return f"FP8 matrix multiplication by row (compute capability {needed} or more)"
    return f"weights widened to bf16 by this package: {device} is no CUDA device of compute capability {needed}"


def loading_arguments(
    precision: str | None, path: Any, kwargs: Mapping[str, Any], auto_class: Any = transformers.AutoModelForCausalLM
) -> dict[str, Any]:
    """`kwargs` with what asks transformers' `from_pretrained` for a precision.

    Args:
        precision: a name in `PRECISIONS`, or `None` for what `kwargs` and the checkpoint say.
        path: a folder, or a name on the hub.
        auto_class: transformers' class that will load it.

    Raises:
        ConfigError: an unknown precision, another argument for the same thing, one that the machine or the checkpoint
            does not have, or tensor parallelism where it does not go.
        MissingExtraError: the precision needs a package that is not installed.
    """
    if precision is not None and precision not in PRECISIONS:
        raise unknown_name("precision", precision, PRECISIONS)
    given = {name: value for name, value in kwargs.items() if value is not None}
    for name in OTHER_NAMES:
        if precision is not None and name in given:
            raise ConfigError(name, "must be unset with precision", given[name], "Give only one.")
    _check_parallel(precision, given)
    saved = _saved_config(path, given)
    if saved is not None:
        _check_parallel(saved_precision(saved), given)
        return {**kwargs, **_for_saved(precision, saved, path, given)}
    if precision is None:
        return dict(kwargs)
    if precision in DTYPES:
        return {**kwargs, "dtype": DTYPES[precision]}
    if precision == "fp8":
        return {**kwargs, "dtype": torch.bfloat16, "quantization_config": fp8_config()}
    load_bitsandbytes(f"precision={precision!r}")
    support = _bnb_support(precision)
    if not support.works:
        raise ConfigError(
            "precision", f"must be one of {_possible()} on this machine ({support.reason})", precision, ""
        )
    make = functools.partial(skeleton, auto_class, path, given) if _is_for_cpu(given) else None
    return {**kwargs, "dtype": torch.bfloat16, "quantization_config": bnb_config(precision, make)}


def _is_for_cpu(given: Mapping[str, Any]) -> bool:
    """Returns whether a part of the model will lie in the CPU's memory."""
    places = given.get("device_map")
    named = places.values() if isinstance(places, Mapping) else [places]
    return default_device().type == "cpu" or any(str(place) in ("cpu", "disk") for place in named)


def skeleton(auto_class: Any, path: Any, given: Mapping[str, Any]) -> Any:
    """The model without weights.

    Args:
        given: arguments of `from_pretrained`.
    """
    config = _config_of(path, given)
    with torch.device("meta"):
        return auto_class.from_config(config, **{k: v for k, v in given.items() if k == "trust_remote_code"})


def saved_precision(saved: Mapping[str, Any]) -> str:
    """The name of a checkpoint's `quantization_config`: a precision's where it is one, else its own."""
    method = str(saved.get("quant_method") or "bitsandbytes")
    if method == "bitsandbytes":
        if saved.get("load_in_8bit"):
            return "int8"
        kind = str(saved.get("bnb_4bit_quant_type") or "fp4")
        return kind if kind == "nf4" else f"bitsandbytes {kind}"
    return "fp8" if saved_here(saved) else f"{method} checkpoint"


def _for_saved(precision: str | None, saved: Mapping[str, Any], path: Any, given: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments for a checkpoint that is quantised already."""
    own, method = saved_precision(saved), saved.get("quant_method")
    if saved_here(saved) and precision in (None, "auto", "fp8") and "quantization_config" not in given:
        fp8_config()
        ours = {"quant_method": METHOD, "ignore": list(saved.get("ignore") or [])}
        return {"config": _config_with(ours, path, given)}
    _need_packages(own, method)
    if precision is None:
        return {}
    if precision in ("auto", own):
        return {"dtype": "auto"}
    dequantised = tuple(name for name in DTYPES if name != "auto") if method in DEQUANTISED else ()
    if precision in dequantised:
        return {"dtype": DTYPES[precision], "config": _config_with({**saved, "dequantize": True}, path, given)}
    allowed = dict.fromkeys(("auto", *((own,) if own in PRECISIONS else ()), *dequantised))
    rule = f"must be one of {', '.join(map(repr, allowed))} for this checkpoint, whose weights are {own}"
    raise ConfigError("precision", rule, precision, 'Load it with "auto", or take a checkpoint in full precision.')


def _config_with(quantization_config: dict[str, Any], path: Any, given: Mapping[str, Any]) -> Any:
    """The checkpoint's configuration with another word on its weights."""
    config = copy.deepcopy(_config_of(path, given))
    config.quantization_config = quantization_config
    return config


def _config_of(path: Any, given: Mapping[str, Any]) -> Any:
    """The configuration in the arguments, which may be a folder or name of one, or the checkpoint's."""
    config = given.get("config") or path
    if isinstance(config, transformers.PreTrainedConfig):
        return config
    return transformers.AutoConfig.from_pretrained(config, **_only(given, "trust_remote_code"))


def dtype_after_widening(arguments: Mapping[str, Any]) -> torch.dtype | None:
    """The dtype to cast a checkpoint to that `arguments` have widened: some formats come out as bf16 all the same."""
    saved = getattr(arguments.get("config"), "quantization_config", None)
    widens = isinstance(saved, Mapping) and saved.get("dequantize")
    dtype = arguments.get("dtype")
    return dtype if widens and isinstance(dtype, torch.dtype) else None


def checkpoint_config(path: Any) -> Mapping[str, Any] | None:
    """The `quantization_config` of a checkpoint that is quantised already, else `None`."""
    return _saved_config(path, {})


def _saved_config(path: Any, given: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """The checkpoint's `quantization_config`, if it has one."""
    if "gguf_file" in given:
        return None
    if "config" in given and isinstance(given["config"], transformers.PreTrainedConfig):
        saved = getattr(given["config"], "quantization_config", None)
        found = saved if isinstance(saved, Mapping) or saved is None else saved.to_dict()
    else:
        content, _ = transformers.PreTrainedConfig.get_config_dict(path, **_only(given))
        text = content.get("text_config")
        found = content.get("quantization_config") or (text or {}).get("quantization_config")
    return found if isinstance(found, Mapping) and found else None


def _only(given: Mapping[str, Any], *more: str) -> dict[str, Any]:
    return {name: given[name] for name in (*HUB_ARGUMENTS, *more) if name in given}


def _check_parallel(precision: str | None, given: Mapping[str, Any]) -> None:
    """Tensor parallelism shards ordinary weights, and places them itself."""
    used = next((name for name in PARALLEL if name in given), None)
    if used is None:
        return
    if "device_map" in given:
        rule = f"must be unset with {used}, which places every shard itself"
        raise ConfigError("device_map", rule, given["device_map"], "Give only one of the two.")
    quantised = given.get("quantization_config", precision if precision not in DTYPES else None)
    if quantised is not None:
        rule = "must be unset for quantised weights, which are not sharded"
        remedy = 'Use precision "bf16" with it, or device_map="auto" without it.'
        raise ConfigError(used, rule, given[used], remedy)


def _need_packages(own: str, method: Any) -> None:
    if method == "bitsandbytes" or own in FROM_BNB:
        load_bitsandbytes(f"a checkpoint in {own}")
    if method == "compressed-tensors" and importlib.util.find_spec("compressed_tensors") is None:
        raise MissingExtraError("compressed-tensors", "fp8", "a compressed-tensors checkpoint")


def _bnb_support(precision: str) -> Support:
    if not is_installed():
        return Support(precision, False, 'bitsandbytes is missing: pip install "hf_specdec[bnb]"')
    known: set[str] = getattr(load_bitsandbytes(precision), "supported_torch_devices", set())
    device = default_device().type
    if device not in known:
        return Support(precision, False, f"the installed bitsandbytes does not know {device}")
    return Support(precision, True, f"bitsandbytes on {device}")


def _possible() -> str:
    return ", ".join(repr(support.precision) for support in machine_support() if support.works)
