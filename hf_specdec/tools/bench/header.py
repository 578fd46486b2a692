"""Source of the numbers of a measurement: model, settings, hardware, versions, commit."""

import dataclasses
import datetime
import os
import platform
import subprocess
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

import hf_specdec
from hf_specdec.compat.attention import attention_implementation
from hf_specdec.errors import counted
from hf_specdec.kernels.quantization.weights import num_parameters, precision_of
from hf_specdec.tools.bench.loaded_model import LoadedModel

PACKAGE = Path(hf_specdec.__file__).parent
LIBRARIES = ("torch", "transformers")


def make_header(loaded: LoadedModel, settings: Any) -> dict[str, Any]:
    """Make the header of a file of records: what a stranger needs to measure again, as JSON values.

    Args:
        settings: a dataclass.
    """
    return {
        "model": loaded.name,
        "num_parameters": num_parameters(loaded.model),
        "dtype": precision_of(loaded.model),
        "attention": attention_implementation(loaded.model.config),
        "device": torch.cuda.get_device_name(loaded.device) if loaded.device.type == "cuda" else loaded.device.type,
        "settings": dataclasses.asdict(settings),
        **machine_header(),
    }


def machine_header() -> dict[str, Any]:
    """Fields of a header that say nothing of the model."""
    return {
        "cpu": _cpu_name(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "versions": _versions(),
        "commit": _commit(),
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
    }


def describe(header: Mapping[str, Any]) -> list[str]:
    """Describe a header in lines for people."""
    settings, versions = header["settings"], header["versions"]
    size = f"{header['num_parameters'] / 1e6:.1f}M parameters, " if "num_parameters" in header else ""
    machine = f"{header['device']}, {header['cpu']}, {header['cores']} cores, {counted(header['threads'], 'thread')}"
    return [
        f"{header['model']}, {size}{header['dtype']}; {machine}",
        ", ".join(f"{name} {value}" for name, value in settings.items() if value is not None),
        ", ".join(f"{name} {value}" for name, value in versions.items())
        + f"; commit {header['commit'] or 'unknown'}; {header['date']}",
    ]


def _versions() -> dict[str, str]:
    versions = {"python": platform.python_version(), "hf_specdec": hf_specdec.__version__}
    return versions | {name: metadata.version(name) for name in LIBRARIES}


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.processor() or platform.machine())


def _commit() -> str | None:
    """The commit of the checkout that the package runs from, `+` where files differ; `None` outside of one."""
    if _git("ls-files", "--error-unmatch", "__init__.py") is None:
        return None
    commit = _git("rev-parse", "--short=12", "HEAD")
    return f"{commit}+" if _git("status", "--porcelain", "--untracked-files=no", ".") else commit


def _git(*words: str) -> str | None:
    try:
        done = subprocess.run(["git", "-C", str(PACKAGE), *words], capture_output=True, text=True, timeout=10)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip() if done.returncode == 0 else None
