"""EAGLE-3 heads on disk: reading both published formats, writing the speculators format."""

import contextlib
import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from hf_specdec.compat.hub_files import cached_file
from hf_specdec.errors import CheckpointError, ConfigError, SpecError, first_line
from hf_specdec.methods.eagle3.head_config import Eagle3HeadConfig, is_head_config
from hf_specdec.methods.eagle3.network import Eagle3Head
from hf_specdec.utils.files import is_missing_folder, json_value, replacing, said_of_hub, saving_tensors

__all__ = ["is_head", "load_head", "save_head"]

WEIGHTS = ("model.safetensors", "pytorch_model.bin")
INDICES = ("model.safetensors.index.json", "pytorch_model.bin.index.json")
# of the target, which the training code keeps beside the head
TARGETS_OWN = ("verifier_lm_head.", "verifier_norm.", "rotary_emb.")


def is_head(path: str | os.PathLike[str]) -> bool:
    """Whether a folder or hub name is that of an EAGLE-3 head, as far as its config.json says."""
    try:
        found = _optional_file(path, "config.json", {})
        return found is not None and is_head_config(_object(found))
    except CheckpointError:
        return False


def load_head(path: str | os.PathLike[str], *, dtype: torch.dtype | None = None, **hub: Any) -> Eagle3Head:
    """Read a head from a folder or from the Hugging Face hub.

    Args:
        path: a folder, or a name on the hub.
        dtype: of the weights; by default that of the file.
        hub: `revision`, `token`, `cache_dir`, `local_files_only`, ... as in transformers.

    Raises:
        CheckpointError: something is missing or damaged.
        ConfigError: config.json describes no EAGLE-3 head.
    """
    file = _file(path, "config.json", hub)
    with _describing_a_head(file):
        config = Eagle3HeadConfig.from_dict(_object(file))
    weights = _named_as_ours(_weights(path, hub))
    with _describing_a_head(file):
        head = Eagle3Head(config, has_embedding="embed_tokens.weight" in weights)
    _check(head, weights, path)
    head.load_state_dict(weights)
    head.to(dtype or weights["fc.weight"].dtype)
    head.name_or_path = os.fspath(path)
    return head.eval().requires_grad_(False)


def save_head(head: Eagle3Head, folder: str | os.PathLike[str]) -> None:
    """Write `folder`/config.json and `folder`/model.safetensors in the speculators format.

    Raises:
        OSError: they cannot be written; a file that was there stays as it is.
    """
    target = Path(folder)
    target.mkdir(parents=True, exist_ok=True)
    values = head.config.to_dict()
    values["dtype"] = str(head.dtype).removeprefix("torch.")
    weights = {name: weight.detach().cpu().contiguous() for name, weight in head.state_dict().items()}
    with saving_tensors(target / "model.safetensors"), replacing(target / "model.safetensors") as beside:
        save_file(weights, beside, metadata={"format": "pt"})
    with replacing(target / "config.json") as beside:
        beside.write_text(json.dumps(values, indent=2) + "\n", "utf-8")


@contextlib.contextmanager
def _describing_a_head(file: Path) -> Iterator[None]:
    """Let errors that come from odd values in a configuration name its file."""
    try:
        yield
    except ConfigError as error:
        raise ConfigError(error.field, error.rule, error.value, f"{error.remedy} It is in {str(file)!r}.") from error
    except SpecError:
        raise
    except (AttributeError, LookupError, RuntimeError, TypeError, ValueError) as error:
        raise CheckpointError(f"{str(file)!r} must describe a draft head, but does not: {first_line(error)}") from error


def _file(path: str | os.PathLike[str], name: str, hub: Mapping[str, Any]) -> Path:
    found = _optional_file(path, name, hub)
    if found is None:
        remedy = "Pass the folder or the hub name of a draft head."
        if not Path(path).exists():
            raise CheckpointError(said_of_hub(path, f"no {name} was found. {remedy}"))
        raise CheckpointError(f"{os.fspath(path)!r} has no {name}. {remedy}")
    return found


def _optional_file(path: str | os.PathLike[str], name: str, hub: Mapping[str, Any]) -> Path | None:
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


def _weights(path: str | os.PathLike[str], hub: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """All weights, from one file or from those that an index names."""
    for name in WEIGHTS:
        if (found := _optional_file(path, name, hub)) is not None:
            return _read(found)
    for name in INDICES:
        if (found := _optional_file(path, name, hub)) is not None:
            places = _object(found).get("weight_map")
            if not isinstance(places, dict) or not all(isinstance(part, str) for part in places.values()):
                raise CheckpointError(f"{str(found)!r} must hold a weight_map from weights to files, but does not.")
            parts = sorted(set(places.values()))
            return {name: weight for part in parts for name, weight in _read(_file(path, part, hub)).items()}
    raise CheckpointError(f"{os.fspath(path)!r} has none of {', '.join((*WEIGHTS, *INDICES))}.")


def _object(file: Path) -> dict[str, Any]:
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


def _read(file: Path) -> dict[str, torch.Tensor]:
    try:
        if file.suffix == ".safetensors":
            return load_file(file)
        weights: dict[str, torch.Tensor] = torch.load(file, map_location="cpu", weights_only=True)
        return weights
    except (SafetensorError, RuntimeError, EOFError, OSError) as error:
        raise CheckpointError(f"{file} cannot be read: {error}") from error


def _named_as_ours(weights: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """SafeAILab's `midlayer.` is `layers.0.`; what belongs to the target is left out."""
    named: dict[str, torch.Tensor] = {}
    for name, weight in weights.items():
        name = name.removeprefix("model.")
        if name.startswith("midlayer."):
            name = name.replace("midlayer.", "layers.0.", 1)
        if not name.startswith(TARGETS_OWN):
            named[name] = weight
    return named


def _check(head: Eagle3Head, weights: dict[str, torch.Tensor], path: str | os.PathLike[str]) -> None:
    """Refuse weights that are missing, left over or of another shape; both sizes are named."""
    wanted = head.state_dict()
    if head.d2t is None:  # files of a full vocabulary may carry maps all the same; they map every id to itself
        for name in ("d2t", "t2d"):
            weights.pop(name, None)
    elif "d2t" in weights:
        ids = weights["d2t"].long() + torch.arange(len(weights["d2t"]))
        weights["d2t"] = weights["d2t"].long()
        mask = torch.zeros(head.config.vocab_size, dtype=torch.bool)
        weights["t2d"] = mask.index_fill(0, ids, True) if int(ids.max()) < len(mask) else weights.get("t2d", mask)
    problems = [f"{name} is missing" for name in wanted if name not in weights]
    problems += [f"{name} is not part of such a head" for name in weights if name not in wanted]
    for name, weight in weights.items():
        if name in wanted and weight.shape != wanted[name].shape:
            problems.append(f"{name} is {tuple(weight.shape)}, but config.json says {tuple(wanted[name].shape)}")
    if problems:
        shown = "; ".join(problems[:4]) + (f"; and {len(problems) - 4} more" if len(problems) > 4 else "")
        raise CheckpointError(f"The weights of {os.fspath(path)!r} are not those of its config.json: {shown}.")
