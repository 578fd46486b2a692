"""Source of the numbers of a document: hardware, precision, threads, versions, commit."""

import datetime
import os
import platform
import subprocess
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

import hf_specdec
from hf_specdec.compat import attention_implementation
from hf_specdec.kernels.quantization.weights import num_parameters, parameter_bytes, precision_of
from hf_specdec.tools.bench.document import FORMAT
from hf_specdec.tools.bench.loaded_model import LoadedModel
from hf_specdec.tools.bench.memory import how_measured

PACKAGE = Path(hf_specdec.__file__).parent
LIBRARIES = ("torch", "transformers", "accelerate")


def new_document(kind: str, device: torch.device, **fields: Any) -> dict[str, Any]:
    """Make a document without tables, in which nothing has been measured.

    Args:
        fields: `settings`, `models`, and `notes` or records.
    """
    empty: dict[str, Any] = {"settings": {}, "models": [], "tables": [], "notes": []}
    return {"format": FORMAT, "kind": kind, "header": header(device), **empty, **fields, "is_complete": False}


def header(device: torch.device) -> dict[str, Any]:
    """Everything a stranger needs to rerun a measurement but the models, as JSON values."""
    return {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "hardware": _hardware(device),
        "device": str(device),
        "threads": torch.get_num_threads(),
        "versions": {
            "python": platform.python_version(),
            "hf_specdec": hf_specdec.__version__,
            **{name: metadata.version(name) for name in LIBRARIES},
        },
        "commit": _commit(),
        "load_average": [round(load, 2) for load in os.getloadavg()] if hasattr(os, "getloadavg") else None,
    }


def model_facts(loaded: LoadedModel) -> dict[str, Any]:
    """Facts about one model, as JSON values."""
    model = loaded.model
    return {
        "name": loaded.label,
        "dtype": precision_of(model),
        "attention": attention_implementation(model.config),
        "model": {
            "name": loaded.name,
            "architecture": type(model).__name__,
            "parameters": num_parameters(model),
            "bytes": parameter_bytes(model),
            **loaded.facts,
        },
        "assistant": loaded.assistant_name,
        "assistant_dtype": None if loaded.assistant is None else precision_of(loaded.assistant),
        "peak_memory": how_measured(loaded.device),
    }


def _hardware(device: torch.device) -> dict[str, Any]:
    found: dict[str, Any] = {"cpu": _cpu_name(), "cores": os.cpu_count(), "platform": platform.platform(terse=True)}
    if device.type == "cuda":
        found["accelerator"] = torch.cuda.get_device_name(device)
    elif device.type != "cpu":
        found["accelerator"] = device.type
    return found


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
    changed = _git("status", "--porcelain", "--untracked-files=no", ".")
    return commit if not changed else f"{commit}+"


def _git(*words: str) -> str | None:
    try:
        done = subprocess.run(["git", "-C", str(PACKAGE), *words], capture_output=True, text=True, timeout=10)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip() if done.returncode == 0 else None
