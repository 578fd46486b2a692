"""Draft heads on disk: a config.json and the weights, in a folder or on the Hugging Face hub."""

import contextlib
import os
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import nn
from transformers import PretrainedConfig

from hf_specdec.common.files import is_missing_folder, json_value, said_of_hub
from hf_specdec.compat.hub_files import cached_file
from hf_specdec.errors import CheckpointError, ConfigError, SpecError, first_line

WEIGHTS = ("model.safetensors", "pytorch_model.bin")
INDICES = ("model.safetensors.index.json", "pytorch_model.bin.index.json")


def config_file(path: str | os.PathLike[str], hub: Mapping[str, Any]) -> Path:
    """The config.json of a folder or hub name.

    Args:
        hub: `revision`, `token`, `cache_dir`, `local_files_only`, ... as in transformers.

    Raises:
        CheckpointError: there is none.
    """
    return _file(path, "config.json", hub)


def known_config(path: str | os.PathLike[str], hub: Mapping[str, Any]) -> dict[str, Any]:
    """The values of a config.json; none where there is no such file, or it cannot be read."""
    try:
        found = optional_file(path, "config.json", hub)
        return {} if found is None else json_object(found)
    except CheckpointError:
        return {}


def json_object(file: Path) -> dict[str, Any]:
    """A file's JSON object.

    Raises:
        CheckpointError: it holds something else.
    """
    try:
        values = json_value(file.read_text("utf-8"))
    except UnicodeDecodeError:
        values = None
    if not isinstance(values, dict):
        raise CheckpointError(f"{str(file)!r} must hold a JSON object, but does not. Is it damaged?")
    return values


def layer_values(config: PretrainedConfig) -> dict[str, Any]:
    """What config.json holds of the layers' configuration, without what belongs to a whole model."""
    dropped = {"architectures", "transformers_version", "_name_or_path", "torch_dtype", "dtype"}
    return {name: value for name, value in config.to_dict().items() if name not in dropped and not callable(value)}


@contextlib.contextmanager
def describing_a_head(file: Path) -> Iterator[None]:
    """Let errors that come from odd values in a configuration name its file."""
    try:
        yield
    except ConfigError as error:
        raise ConfigError(error.field, error.rule, error.value, f"{error.remedy} It is in {str(file)!r}.") from error
    except SpecError:
        raise
    except (AttributeError, LookupError, RuntimeError, TypeError, ValueError) as error:
        raise CheckpointError(f"{str(file)!r} must describe a draft head, but does not: {first_line(error)}") from error


def optional_file(path: str | os.PathLike[str], name: str, hub: Mapping[str, Any]) -> Path | None:
    """The file `name` of a folder or hub name; `None` where it has none.

    Raises:
        CheckpointError: there is no such folder, or it cannot be read.
    """
    try:
        found = cached_file(os.fspath(path), name, _raise_exceptions_for_missing_entries=False, **hub)
    except OSError as error:
        if is_missing_folder(path):
            rule = "`path` must be an existing folder, but there is no"
            raise CheckpointError(f"{rule} {os.fspath(path)!r}. Check the spelling.") from error
        if not Path(path).exists():
            raise CheckpointError(said_of_hub(path, first_line(error))) from error
        raise CheckpointError(f"{os.fspath(path)!r} cannot be read: {error}") from error
    return None if found is None else Path(found)


def read_weights(path: str | os.PathLike[str], hub: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """All weights, from one file or from those that an index names.

    Raises:
        CheckpointError: there are none, or they are damaged.
    """
    for name in WEIGHTS:
        if (found := optional_file(path, name, hub)) is not None:
            return read_tensors(found)
    for name in INDICES:
        if (found := optional_file(path, name, hub)) is not None:
            places = json_object(found).get("weight_map")
            if not isinstance(places, dict) or not all(isinstance(part, str) for part in places.values()):
                raise CheckpointError(f"{str(found)!r} must hold a weight_map from weights to files, but does not.")
            parts = sorted(set(places.values()))
            return {name: weight for part in parts for name, weight in read_tensors(_file(path, part, hub)).items()}
    raise CheckpointError(f"{os.fspath(path)!r} has none of {', '.join((*WEIGHTS, *INDICES))}.")


def read_tensors(file: Path) -> dict[str, torch.Tensor]:
    """The tensors of a safetensors file or of one that torch has saved.

    Raises:
        CheckpointError: it is damaged.
    """
    try:
        if file.suffix == ".safetensors":
            return load_file(file)
        weights: dict[str, torch.Tensor] = torch.load(file, map_location="cpu", weights_only=True)
        return weights
    except (SafetensorError, RuntimeError, EOFError, OSError) as error:
        raise CheckpointError(f"{file} cannot be read: {error}") from error


def take_weights(
    head: nn.Module, weights: Mapping[str, torch.Tensor], path: str | os.PathLike[str], *, unread: Collection[str] = ()
) -> None:
    """Load `weights` into `head`.

    Args:
        unread: names that may be there and are left out.

    Raises:
        CheckpointError: weights are missing, left over or of another shape; both sizes are named.
    """
    weights = {name: weight for name, weight in weights.items() if name not in unread}
    wanted = head.state_dict()
    problems = [f"{name} is missing" for name in wanted if name not in weights]
    problems += [f"{name} is not part of such a head" for name in weights if name not in wanted]
    for name, weight in weights.items():
        if name in wanted and weight.shape != wanted[name].shape:
            problems.append(f"{name} is {tuple(weight.shape)}, but config.json says {tuple(wanted[name].shape)}")
    if problems:
        shown = "; ".join(problems[:4]) + (f"; and {len(problems) - 4} more" if len(problems) > 4 else "")
        raise CheckpointError(f"The weights of {os.fspath(path)!r} are not those of its config.json: {shown}.")
    head.load_state_dict(weights)


def _file(path: str | os.PathLike[str], name: str, hub: Mapping[str, Any]) -> Path:
    found = optional_file(path, name, hub)
    if found is None:
        remedy = "Pass the folder or the hub name of a draft head."
        if not Path(path).exists():
            raise CheckpointError(said_of_hub(path, f"no {name} was found. {remedy}"))
        raise CheckpointError(f"{os.fspath(path)!r} has no {name}. {remedy}")
    return found
