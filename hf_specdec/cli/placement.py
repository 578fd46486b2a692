"""Where a command puts the model: `device_list` against the devices that there are.

device_map, max_memory = place([0])
"""

from collections.abc import Sequence

import torch

from hf_specdec.cli.report import note
from hf_specdec.errors import ConfigError

__all__ = ["place"]

Placement = tuple[str | dict[str, str] | None, dict[int | str, int] | None]


def place(device_list: Sequence[int | str] | None) -> Placement:
    """`device_map` and `max_memory` for `from_pretrained`.

    Without a list the model goes to the GPUs if there are any. Devices that this machine lacks are named once on
    stderr, and the model stays where it is without a list.

    Raises:
        ConfigError: a name that is no device, or several devices that are not all GPUs.
    """
    default = "auto" if torch.accelerator.is_available() else None
    if device_list is None:
        return default, None
    devices = [_device(item, device_list) for item in device_list]
    missing = [str(device) for device in devices if not _is_here(device)]
    if missing:
        where = "on the GPUs that there are" if default else "on cpu"
        note(f"note: device_list names {', '.join(missing)}, which this machine lacks; the model stays {where}")
        return default, None
    if len(devices) == 1:
        return {"": str(devices[0])}, None
    if any(device.type != "cuda" for device in devices):
        raise ConfigError("device_list", "must name GPUs only, if several devices", device_list, "Write [0, 1].")
    return "auto", {device.index or 0: torch.cuda.mem_get_info(device)[0] for device in devices}


def _device(item: int | str, device_list: Sequence[int | str]) -> torch.device:
    try:
        return torch.device("cuda", item) if isinstance(item, int) else torch.device(item)
    except RuntimeError as error:
        remedy = 'Write [0], [4, 5] or ["cpu"].'
        raise ConfigError("device_list", "must name devices that torch knows", device_list, remedy) from error


def _is_here(device: torch.device) -> bool:
    if device.type == "cpu":
        return True
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if accelerator is None or device.type != accelerator.type:
        return False
    return (device.index or 0) < torch.accelerator.device_count()
