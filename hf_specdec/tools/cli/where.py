"""Placement of a command's models: options to arguments of `from_pretrained`, and processes that share a model."""

import contextlib
import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from accelerate import PartialState
from accelerate.utils import convert_file_size_to_int
from transformers import PreTrainedModel

from hf_specdec.common.files import json_value
from hf_specdec.distributed.placement import STRATEGIES, place, read_device
from hf_specdec.errors import ConfigError
from hf_specdec.methods.common.config import SpecConfig

MEMORY_NAMES = ("cpu", "disk", "mps")
LAUNCH = "Start it with: torchrun --nproc-per-node 2 -m hf_specdec ... --tensor-parallel"


def processes() -> PartialState:
    """The process itself among those it was started with; alone, it is the first of one.

    accelerate looks for other processes on CPUs only if it is told that CPUs are used.
    """
    asked = os.environ.get("ACCELERATE_USE_CPU", "").lower() in ("1", "true", "yes", "on")
    return PartialState(cpu=asked or not torch.accelerator.is_available())


@dataclass(frozen=True, slots=True)
class Where:
    """Placement of the models of a command.

    Attributes:
        target: arguments of `from_pretrained` for the target.
        tensor_parallel (`bool`): whether the processes of this launch share one target.
        device (`torch.device | None`): of this process, where several share a job.
    """

    target: dict[str, Any]
    tensor_parallel: bool = False
    device: torch.device | None = None

    def device_of_draft(self, target: PreTrainedModel) -> torch.device | None:
        """Device of a draft without a device list; `None` leaves it to the machine."""
        return target.device if self.tensor_parallel else self.device

    @contextlib.contextmanager
    def together(self) -> Iterator[None]:
        """Only the first of several processes speaks; they leave together, or not at all where one has failed."""
        if not self.tensor_parallel:
            yield
            return
        with contextlib.ExitStack() as stack:
            if int(os.environ["RANK"]) > 0:
                silence = stack.enter_context(open(os.devnull, "w"))
                stack.enter_context(contextlib.redirect_stdout(silence))
            yield
            sys.stdout.flush()
        dist.barrier()
        dist.destroy_process_group()


def read_where(
    device_map: str | None,
    max_memory: str | None,
    offload_folder: Path | None,
    config: SpecConfig | None,
    *,
    tensor_parallel: bool,
    device: torch.device | None,
) -> Where:
    """The options, checked against one another.

    Args:
        config: the method's, whose device lists say where models go as well.
        device: of this process, where several share a job and each has a model of its own.
    """
    listed = config.device_lists.get("target") if config is not None else None
    for option, value in {"--max-memory": max_memory, "--offload-folder": offload_folder}.items():
        if value is not None and device_map is None:
            raise ConfigError(option, "must come with --device-map", str(value), "Add --device-map auto.")
    if tensor_parallel:
        if device_map is not None:
            rule = "must be left out with --tensor-parallel"
            raise ConfigError("--device-map", rule, device_map, "Each process takes the device of its number.")
        if listed is not None:
            rule = "must be left out with --tensor-parallel"
            raise ConfigError("device_list", rule, listed, "Each process takes the device of its number.")
        if int(os.environ.get("WORLD_SIZE", "1")) < 2:  # of torchrun and accelerate launch
            raise ConfigError("--tensor-parallel", "must run in several processes", 1, LAUNCH)
        return Where({"tp_plan": "auto"}, True)
    if device_map is None:
        return Where(placement(config, "target", device), device=device)
    if listed is not None:
        raise ConfigError("--device-map", "must be left out next to a device list", device_map, "Give only one.")
    if device is not None:
        rule = "must be left out where several processes share a job"
        raise ConfigError("--device-map", rule, device_map, "Each process takes a device of its own.")
    target: dict[str, Any] = {"device_map": _device_map(device_map)}
    if max_memory is not None:
        sizes = _json_of("--max-memory", max_memory).items()
        target["max_memory"] = {_memory_device(name): _size(size) for name, size in sizes}
    if offload_folder is not None:
        target["offload_folder"] = str(offload_folder)
    return Where(target)


def placement(config: SpecConfig | None, role: str, device: torch.device | None) -> dict[str, Any]:
    """Arguments of `from_pretrained`: where the configuration's list for a role says, else on `device`."""
    fields, lists = (config.device_fields, config.device_lists) if config is not None else ({}, {})
    if device is not None and lists.get(role) is None:
        return {"device_map": {"": str(device)}}
    device_map, max_memory = place(lists.get(role), fields.get(role, ""))
    return {"device_map": device_map, "max_memory": max_memory}


def _device_map(text: str) -> str | dict[str, Any]:
    """One of accelerate's strategies, one device for everything, or a device for each part."""
    if text in STRATEGIES:
        return text
    if text.startswith("{"):
        found = _json_of("--device-map", text)
        for device in found.values():
            if device != "disk":
                read_device(device, "--device-map")
        return found
    if text == "disk":
        return {"": text}
    try:
        torch.device(text)
    except RuntimeError as error:
        rule = f"must be one of {', '.join(STRATEGIES)}, a device, or JSON of parts and devices"
        raise ConfigError("--device-map", rule, text, 'For example auto, cpu, or \'{"model": "cpu"}\'.') from error
    read_device(text, "--device-map")
    return {"": text}


def _memory_device(name: str) -> int | str:
    """Accelerate's name for the device of a size: the number of an accelerator, or a name."""
    if not name.isdecimal() and name not in MEMORY_NAMES:
        rule = f"must have sizes of {', '.join(MEMORY_NAMES)} or numbers of accelerators"
        raise ConfigError("--max-memory", rule, name, 'For example \'{"0": "20GB", "cpu": "60GB"}\'.')
    return int(name) if name.isdecimal() else name


def _size(size: Any) -> int:
    """Bytes of a number or of a text such as "20GB"."""
    try:
        return int(convert_file_size_to_int(size))
    except (ValueError, AttributeError) as error:
        rule, remedy = "must hold sizes", "Write bytes, or text such as '20GB'."
        raise ConfigError("--max-memory", rule, size, remedy) from error


def _json_of(option: str, text: str) -> dict[str, Any]:
    found = json_value(text)
    if not isinstance(found, dict):
        raise ConfigError(option, "must be a JSON object", text, 'For example \'{"0": "20GB", "cpu": "60GB"}\'.')
    return found
