"""Precisions: what this machine can do, what a checkpoint allows, and the arguments that ask transformers for it."""

import copy
import importlib.util
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch
import transformers

from hf_specdec.distributed.placement import default_device
from hf_specdec.errors import ConfigError, MissingExtraError, unknown_name
from hf_specdec.kernels.packed import why_unused
from hf_specdec.kernels.packed_loading import packed_config
from hf_specdec.kernels.quantization.bnb import layers_to_leave

DTYPES: Mapping[str, torch.dtype | str] = MappingProxyType(
    {"auto": "auto", "fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
)
PACKAGES = MappingProxyType(  # of quantised precisions: name and extra
    {"fp8": ("torchao", "fp8"), "int8": ("bitsandbytes", "bnb"), "nf4": ("bitsandbytes", "bnb")}
)
PRECISIONS = (*DTYPES, *PACKAGES)
METHOD_PACKAGES = MappingProxyType(  # of checkpoints that are quantised already
    {
        "bitsandbytes": ("bitsandbytes", "bnb"),
        "torchao": ("torchao", "fp8"),
        "compressed-tensors": ("compressed_tensors", "fp8"),
    }
)
FP8_CAPABILITY = (8, 9)  # of CUDA devices with FP8 matrix multiplication
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
    support = [Support(name, True, "torch") for name in DTYPES if name != "auto"]
    for precision, (package, extra) in PACKAGES.items():
        if precision == "int8" and lies_on_cpu({}) and why_unused() is None:
            support.append(Support(precision, True, "the compiled core"))
            continue
        works = importlib.util.find_spec(package) is not None
        line = package if works else f'{package} is missing: pip install "hf_specdec[{extra}]"'
        support.append(Support(precision, works, line))
    return support


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
    options = {name: value for name, value in kwargs.items() if value is not None}
    for name in OTHER_NAMES:
        if precision is not None and name in options:
            raise ConfigError(name, "must be unset with precision", options[name], "Give only one.")
    _check_parallel(precision, options)
    saved = _saved_config(path, options)
    if saved is not None:
        _check_parallel(saved_precision(saved), options)
        return {**kwargs, **_for_saved(precision, saved, path, options)}
    if precision is None:
        return dict(kwargs)
    if precision in DTYPES:
        return {**kwargs, "dtype": DTYPES[precision]}
    if precision == "int8" and lies_on_cpu(options) and why_unused() is None:
        return {**kwargs, "dtype": torch.bfloat16, "quantization_config": packed_config()}
    _need(PACKAGES[precision], f"precision={precision!r}")
    config = _quantization_config(precision, path, options, auto_class)
    return {**kwargs, "dtype": torch.bfloat16, "quantization_config": config}


def _quantization_config(precision: str, path: Any, options: Mapping[str, Any], auto_class: Any) -> Any:
    """transformers' configuration for `"fp8"`, `"int8"` or `"nf4"`."""
    is_for_cpu = _is_for_cpu(options)
    if precision == "fp8":
        places = options.get("device_map")
        if isinstance(places, Mapping) and "disk" in places.values():
            rule = "must not put weights on the disk that are quantised while they are read"
            on_disk = {part: place for part, place in places.items() if place == "disk"}
            raise ConfigError("device_map", rule, on_disk, 'Use precision="bf16" with it.')
        from torchao.quantization import Float8DynamicActivationFloat8WeightConfig, Float8WeightOnlyConfig, PerRow

        if not is_for_cpu and multiplies_fp8(default_device()):
            return transformers.TorchAoConfig(Float8DynamicActivationFloat8WeightConfig(granularity=PerRow()))
        return transformers.TorchAoConfig(Float8WeightOnlyConfig())
    if precision == "int8":
        return transformers.BitsAndBytesConfig(load_in_8bit=True)
    return transformers.BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_compute_dtype=torch.bfloat16,
        llm_int8_skip_modules=layers_to_leave(skeleton(auto_class, path, options)) if is_for_cpu else None,
    )


def multiplies_fp8(device: torch.device) -> bool:
    """Returns whether a device multiplies FP8 matrices itself."""
    is_cuda = device.type == "cuda" and torch.version.cuda is not None
    return is_cuda and torch.cuda.get_device_capability(device) >= FP8_CAPABILITY


def _is_for_cpu(options: Mapping[str, Any]) -> bool:
    """Returns whether a part of the model will lie in the CPU's memory."""
    places = options.get("device_map")
    named = places.values() if isinstance(places, Mapping) else [places]
    return default_device().type == "cpu" or any(str(place) in ("cpu", "disk") for place in named)


def lies_on_cpu(options: Mapping[str, Any]) -> bool:
    """Returns whether all of the model will lie in the CPU's memory.

    Args:
        options: arguments of `from_pretrained`.
    """
    places, default = options.get("device_map"), default_device()
    named = places.values() if isinstance(places, Mapping) else [places]
    return all(str(default.type if place in (None, "auto") else place) == "cpu" for place in named)


def skeleton(auto_class: Any, path: Any, options: Mapping[str, Any]) -> Any:
    """The model without weights.

    Args:
        options: arguments of `from_pretrained`.
    """
    config = _config_of(path, options)
    with torch.device("meta"):
        return auto_class.from_config(config, **{k: v for k, v in options.items() if k == "trust_remote_code"})


def saved_precision(saved: Mapping[str, Any]) -> str:
    """The name of a checkpoint's `quantization_config`: a precision's where it is one, else that of its method."""
    method = str(saved.get("quant_method") or "bitsandbytes")
    if method == "torchao" and "Float8" in str(saved.get("quant_type")):
        return "fp8"
    if method != "bitsandbytes":
        return f"{method} checkpoint"
    if saved.get("load_in_8bit"):
        return "int8"
    kind = str(saved.get("bnb_4bit_quant_type") or "fp4")
    return kind if kind == "nf4" else f"bitsandbytes {kind}"


def _for_saved(
    precision: str | None, saved: Mapping[str, Any], path: Any, options: Mapping[str, Any]
) -> dict[str, Any]:
    """The arguments for a checkpoint that is quantised already."""
    name, method = saved_precision(saved), saved.get("quant_method") or "bitsandbytes"
    if method in METHOD_PACKAGES:
        _need(METHOD_PACKAGES[method], f"a checkpoint in {name.removesuffix(' checkpoint')}")
    if precision is None:
        return {}
    if precision in ("auto", name):
        return {"dtype": "auto"}
    dequantised = tuple(name for name in DTYPES if name != "auto") if method in DEQUANTISED else ()
    if precision in dequantised:
        config = copy.deepcopy(_config_of(path, options))
        config.quantization_config = {**saved, "dequantize": True}
        return {"dtype": DTYPES[precision], "config": config}
    allowed = dict.fromkeys(("auto", *((name,) if name in PRECISIONS else ()), *dequantised))
    rule = f"must be one of {', '.join(map(repr, allowed))} for this checkpoint, whose weights are {name}"
    raise ConfigError("precision", rule, precision, 'Load it with "auto", or take a checkpoint in full precision.')


def _config_of(path: Any, options: Mapping[str, Any]) -> Any:
    """The configuration in the arguments, which may be a folder or name of one, or the checkpoint's."""
    config = options.get("config") or path
    if isinstance(config, transformers.PreTrainedConfig):
        return config
    return transformers.AutoConfig.from_pretrained(config, **_only(options, "trust_remote_code"))


def dtype_after_widening(arguments: Mapping[str, Any]) -> torch.dtype | None:
    """The dtype to cast a checkpoint to that `arguments` have widened: some formats come out as bf16 all the same."""
    saved = getattr(arguments.get("config"), "quantization_config", None)
    widens = isinstance(saved, Mapping) and saved.get("dequantize")
    dtype = arguments.get("dtype")
    return dtype if widens and isinstance(dtype, torch.dtype) else None


def _saved_config(path: Any, options: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """The checkpoint's `quantization_config`, if it has one."""
    if "gguf_file" in options:
        return None
    if isinstance(options.get("config"), transformers.PreTrainedConfig):
        saved = getattr(options["config"], "quantization_config", None)
        saved = saved if isinstance(saved, Mapping) or saved is None else saved.to_dict()
    else:
        content, _ = transformers.PreTrainedConfig.get_config_dict(path, **_only(options))
        text = content.get("text_config")
        saved = content.get("quantization_config") or (text or {}).get("quantization_config")
    return saved if isinstance(saved, Mapping) and saved else None


def _only(options: Mapping[str, Any], *more: str) -> dict[str, Any]:
    return {name: options[name] for name in (*HUB_ARGUMENTS, *more) if name in options}


def _check_parallel(precision: str | None, options: Mapping[str, Any]) -> None:
    """Tensor parallelism shards ordinary weights, and places them itself."""
    used = next((name for name in PARALLEL if name in options), None)
    if used is None:
        return
    if "device_map" in options:
        rule = f"must be unset with {used}, which places every shard itself"
        raise ConfigError("device_map", rule, options["device_map"], "Give only one of the two.")
    quantised = options.get("quantization_config", precision if precision not in DTYPES else None)
    if quantised is not None:
        rule = "must be unset for quantised weights, which are not sharded"
        remedy = 'Use precision "bf16" with it, or device_map="auto" without it.'
        raise ConfigError(used, rule, options[used], remedy)


def _need(package: tuple[str, str], purpose: str) -> None:
    """Raise a `MissingExtraError` where a package `(name, extra)` is not installed."""
    name, extra = package
    if importlib.util.find_spec(name) is None:
        raise MissingExtraError(name, extra, purpose)
