"""Model, device and settings of measured costs, compared with those of saved ones."""

from collections.abc import Mapping
from typing import Any

import torch
import transformers
from transformers import PreTrainedModel

from hf_specdec.compat import attention_implementation
from hf_specdec.errors import ConfigError
from hf_specdec.kernels.quantization.report import num_parameters, precision_of

MUST_AGREE = ("class", "num_parameters", "dtype", "attention", "device")


def facts_of(model: PreTrainedModel, device: torch.device) -> dict[str, Any]:
    """Conditions of a forward's time, as JSON values."""
    return {
        "model": model.config.name_or_path,
        "class": type(model).__name__,
        "num_parameters": num_parameters(model),
        "dtype": precision_of(model),
        "attention": attention_implementation(model.config),
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else device.type,
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }


def check_facts(saved: Mapping[str, Any], model: PreTrainedModel, device: torch.device, path: str) -> None:
    """Raise where costs were measured for something else; facts that the file does not hold are not compared.

    Raises:
        ConfigError: another model, precision, attention or device; the error names the first difference.
    """
    now = facts_of(model, device)
    for name in MUST_AGREE:
        if name in saved and saved[name] != now[name]:
            rule = f"must be measured for this model: its {name} is {now[name]!r}, that of the file {saved[name]!r}"
            raise ConfigError("costs", rule, path, "Measure again with `hf-specdec tune`, or leave `costs` out.")


def other_threads(saved: Mapping[str, Any], device: torch.device) -> str | None:
    """Warning where costs were measured with another number of CPU threads; steps will correct them."""
    threads = torch.get_num_threads()
    if device.type != "cpu" or saved.get("threads", threads) == threads:
        return None
    return (
        f"the costs were measured with {saved['threads']} CPU threads, and this process uses {threads}; "
        "measure again with `hf-specdec tune`"
    )
