"""`hf-specdec info`: what a model can do here, and what is installed."""

import dataclasses
from typing import Any

import torch
from transformers import PreTrainedModel

import hf_specdec
from hf_specdec.cli import options
from hf_specdec.cli.extras import extras, versions
from hf_specdec.cli.inputs import load, set_threads
from hf_specdec.cli.report import print_json, reports_errors
from hf_specdec.cli.table import print_facts
from hf_specdec.compat import attention_implementation
from hf_specdec.methods import METHODS

__all__ = ["info"]


@reports_errors
def info(
    model: options.ModelPath = None,
    dtype: options.Dtype = "auto",
    threads: options.Threads = None,
    json: options.Json = False,
) -> None:
    """Say what a model can do on this machine and why, and which optional packages are installed."""
    set_threads(model, threads)
    loaded, _ = load(model, dtype, None)
    groups: dict[str, dict[str, Any]] = {
        "versions": versions(),
        "machine": _machine(),
        "model": _model(loaded),
        "capability": dataclasses.asdict(hf_specdec.capability(loaded)),
    }
    aliases = {method.name: list(method.aliases) for method in METHODS.values()}
    optional = extras()
    if json:
        listed = [{**dataclasses.asdict(extra), "install": extra.install} for extra in optional]
        print_json({**groups, "methods": aliases, "extras": listed})
    else:
        methods = {name: f"also {', '.join(others)}" if others else "" for name, others in aliases.items()}
        print_facts([*groups.items(), ("methods", methods), ("extras", {extra.name: extra for extra in optional})])


def _machine() -> dict[str, Any]:
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    count = torch.accelerator.device_count() if accelerator is not None else 0
    return {
        "devices": ["cpu", *(f"{accelerator}:{index}" for index in range(count))],
        "threads": torch.get_num_threads(),
    }


def _model(model: PreTrainedModel) -> dict[str, Any]:
    parameters = list(model.parameters())
    return {
        "path": model.config.name_or_path,
        "architecture": type(model).__name__,
        "parameters": sum(parameter.numel() for parameter in parameters),
        "dtype": str(model.dtype).removeprefix("torch."),
        "devices": sorted({str(parameter.device) for parameter in parameters}),
        "attention": attention_implementation(model.config),
    }
