"""Device placement: device lists against the devices that there are, before loading and after it.

Knows nothing about methods. A device that is not there is an error, never a model that runs elsewhere.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from accelerate import dispatch_model, infer_auto_device_map
from accelerate.utils import get_balanced_memory
from transformers import PreTrainedModel

from hf_specdec.compat.devices import (
    device_mesh,
    execution_device,
    is_dispatched,
    tensor_parallel_arguments,
    unsplittable_modules,
)
from hf_specdec.compat.modules import modules_of, own_weights
from hf_specdec.errors import ConfigError

DEVICE_LIST, DRAFT_LIST, TARGET_LIST = "device_list", "draft_model_device_list", "target_model_device_list"

STRATEGIES = ("auto", "balanced", "balanced_low_0", "sequential")  # of accelerate, for `device_map`
NO_DEVICES = ("disk", "meta")  # that `device_map` takes

DeviceList = Sequence[int | str]
Placement = tuple[str | dict[str, str] | None, dict[int | str, int] | None]


def available_devices() -> list[torch.device]:
    """The devices of this machine: the CPU, then the accelerators by number."""
    accelerator = default_device()
    count = torch.accelerator.device_count() if accelerator.type != "cpu" else 0
    return [torch.device("cpu"), *(torch.device(accelerator.type, index) for index in range(count))]


def default_device() -> torch.device:
    """The accelerator, or the CPU where there is none."""
    return torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")


def read_devices(device_list: DeviceList, field: str = DEVICE_LIST) -> list[torch.device]:
    """The devices that a list names, each once; a number is an accelerator's.

    Raises:
        ConfigError: a name that is no device, a device that is not here, or several that are not all accelerators.
    """
    available = available_devices()
    devices = list(dict.fromkeys(_device(item, device_list, available, field) for item in device_list))
    if any(device not in available for device in devices):
        rule = f"must name devices that are here ({', '.join(map(str, available))})"
        remedy = 'Write [0] or ["cpu"].' if len(available) > 1 else 'Write ["cpu"], or leave the list out.'
        raise ConfigError(field, rule, device_list, remedy)
    if len(devices) > 1 and any(device.type == "cpu" for device in devices):
        raise ConfigError(field, "must name GPUs only, if several devices", device_list, "Write [0, 1].")
    return devices


def read_device(device: int | str | torch.device, field: str) -> torch.device:
    """The one device of a name or number.

    Raises:
        ConfigError: a name that is no device, or a device that is not here.
    """
    available = ", ".join(map(str, available_devices()))
    try:
        return read_devices([str(device) if isinstance(device, torch.device) else device], field)[0]
    except ConfigError as error:
        remedy = "Name one of them, or leave it out."
        raise ConfigError(field, f"must be a device that is here ({available})", device, remedy) from error


def with_checked_map(kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments of `from_pretrained` with a checked `device_map`, "disk" for the whole model as transformers takes it.

    Raises:
        ConfigError: it names a device that is not here, or nothing.
    """
    device_map = kwargs.get("device_map")
    if isinstance(device_map, Mapping) and not device_map:
        raise ConfigError("device_map", "must name a part at least", device_map, 'Write {"": "cpu"}, or leave it out.')
    for device in device_map.values() if isinstance(device_map, Mapping) else [device_map]:
        if device is not None and device not in (*STRATEGIES, *NO_DEVICES):
            read_device(device, "device_map")
    return {**kwargs, "device_map": {"": "disk"}} if device_map == "disk" else dict(kwargs)


def place(device_list: DeviceList | None, field: str = DEVICE_LIST) -> Placement:
    """`device_map` and `max_memory` for `from_pretrained`; without a list the model goes to the GPUs if there are any.

    Raises:
        ConfigError: as `read_devices`.
    """
    if device_list is None:
        return ("auto" if torch.accelerator.is_available() else None), None
    devices = read_devices(device_list, field)
    if len(devices) == 1:
        return {"": str(devices[0])}, None
    return "auto", {device.index: _free_bytes(device) for device in devices}


def is_placed(model: PreTrainedModel, devices: Sequence[torch.device]) -> bool:
    """Returns whether the model is on these devices: on the one, or spread over several of them and no other."""
    here = _devices_of(model)
    return here == set(devices) if len(devices) == 1 else len(here) > 1 and here <= set(devices)


def move(model: PreTrainedModel, device_list: DeviceList, field: str = DEVICE_LIST) -> None:
    """Put a loaded model where the list says, whole on one device or spread over several.

    Raises:
        ConfigError: as `read_devices`, a model that accelerate has placed elsewhere, or one that is too large.
    """
    devices = read_devices(device_list, field)
    if device_mesh(model) is not None:
        rule = "must be unset for a model that several processes share"
        raise ConfigError(field, rule, device_list, "torchrun gives each process the device of its number.")
    if is_placed(model, devices):
        return
    if is_dispatched(model):
        here = ", ".join(sorted(map(str, _devices_of(model))))
        rule = f"must name the devices that {type(model).__name__} was dispatched to ({here})"
        raise ConfigError(field, rule, device_list, "Leave the list out, or load the model without device_map.")
    if len(devices) == 1:
        model.to(devices[0])
        return
    device_map = _spread(model, devices, device_list, field)
    used = {device for device in devices if device.index in device_map.values()}
    if used != _devices_of(model):
        dispatch_model(model, device_map=device_map)


def move_pair(
    target: PreTrainedModel,
    draft: PreTrainedModel,
    *,
    target_devices: DeviceList | None,
    draft_devices: DeviceList | None,
) -> None:
    """Put a target and its draft where their lists say; `None` leaves a model where it is.

    Raises:
        ConfigError: as `move`, or lists that tear apart two models of the same weights.
    """
    if target_devices is None and draft_devices is None:
        return
    draft_on = _devices_of(draft) if draft_devices is None else set(read_devices(draft_devices, DRAFT_LIST))
    target_on = _devices_of(target) if target_devices is None else set(read_devices(target_devices, TARGET_LIST))
    shares_weights = not {id(p) for p in draft.parameters()}.isdisjoint(map(id, target.parameters()))
    if shares_weights and draft_on != target_on:
        remedy = "Give both the same list, or use a draft with weights of its own."
        value = target_devices if draft_devices is None else draft_devices
        field = TARGET_LIST if draft_devices is None else DRAFT_LIST
        raise ConfigError(field, "must agree with the other model's, whose weights it shares", value, remedy)
    if target_devices is not None:
        move(target, target_devices, TARGET_LIST)
    if draft_devices is not None:
        move(draft, draft_devices, DRAFT_LIST)


def where_it_lies(model: PreTrainedModel) -> list[str]:
    """Names of the devices that hold the model's weights, `"disk"` among them."""
    dispatched = {str(place) for place in (getattr(model, "hf_device_map", None) or {}).values()}
    return sorted(dispatched or {str(weight.device) for weight in model.parameters()})


def parallel_arguments(kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments of `from_pretrained` with `tp_plan` put as this release of transformers wants it."""
    plan = {name: kwargs[name] for name in ("tp_plan", "tp_size") if kwargs.get(name) is not None}
    if not plan or kwargs.get("distributed_config") is not None:
        return dict(kwargs)
    others = {name: value for name, value in kwargs.items() if name not in ("tp_plan", "tp_size")}
    return {**others, **tensor_parallel_arguments(plan)}


def _device(item: int | str, device_list: DeviceList, available: Sequence[torch.device], field: str) -> torch.device:
    """One entry of a list, with its number: `"cuda"` is the current one."""
    accelerator = available[-1].type if len(available) > 1 else "cuda"
    try:
        name = f"{accelerator}:{item}" if isinstance(item, int) else item
        device = torch.device(name)
        if str(device) != name:  # torch keeps 8 bits of a number
            raise ValueError(item)
    except (RuntimeError, ValueError, TypeError, OverflowError) as error:
        remedy = 'Write [0], [4, 5] or ["cpu"].'
        raise ConfigError(field, "must name devices that torch knows", device_list, remedy) from error
    if device.type == "cpu" and not device.index:  # torch takes any number of it
        return torch.device("cpu")
    if device.index is None and device.type == accelerator and len(available) > 1:
        return torch.device(device.type, torch.accelerator.current_device_index())
    return device


def _devices_of(model: PreTrainedModel) -> set[torch.device]:
    """Devices of the weights during the forward."""
    devices: set[torch.device] = set()
    for module in modules_of(model):
        for weight in own_weights(module):
            device = execution_device(module) if weight.device.type == "meta" else weight.device
            devices.add(device or weight.device)
    return {torch.device("cpu") if device.type == "cpu" else device for device in devices}


def _spread(
    model: PreTrainedModel, devices: Sequence[torch.device], device_list: DeviceList, field: str
) -> dict[str, Any]:
    """Assigns parts to devices so that all hold about the same."""
    held: dict[torch.device, int] = {}
    for weight in model.parameters():
        held[weight.device] = held.get(weight.device, 0) + weight.numel() * weight.element_size()
    free = {device.index: _free_bytes(device) + held.get(device, 0) for device in devices}
    whole = unsplittable_modules(model)
    balanced = get_balanced_memory(model, max_memory=free, no_split_module_classes=whole)
    device_map = infer_auto_device_map(
        model, max_memory={device.index: balanced[device.index] for device in devices}, no_split_module_classes=whole
    )
    if {"cpu", "disk"} & set(device_map.values()):
        rule = f"must have room for {type(model).__name__} ({sum(held.values()) / 2**30:.1f} GiB of weights)"
        raise ConfigError(field, rule, device_list, "Name more devices, or load it in a lower precision.")
    return dict(device_map)


def _free_bytes(device: torch.device) -> int:
    free, _ = torch.get_device_module(device).mem_get_info(device)
    return int(free)
