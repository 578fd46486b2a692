"""Draft heads on disk: a config.json and the weights, in a folder or on the Hugging Face hub.

files = HeadFiles("path/to/head")
with files.describing_a_head():
    head = MyHead(MyHeadConfig.from_dict(files.values()))
files.fill(head, files.weights(), dtype=None)
"""

import contextlib
import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from hf_specdec.common.files import is_missing_folder, json_value, replacing, said_of_hub
from hf_specdec.compat.loading import cached_file
from hf_specdec.errors import CheckpointError, ConfigError, SpecError, first_line
from hf_specdec.methods.common.draft_head import DraftHead

CONFIG = "config.json"
WEIGHTS = ("model.safetensors", "pytorch_model.bin")


class HeadFiles:
    """Files of one head.

    Args:
        path: a folder, or a name on the hub.
        hub: `revision`, `token`, `cache_dir`, `local_files_only`, ... as in transformers.
    """

    def __init__(self, path: str | os.PathLike[str], hub: Mapping[str, Any] | None = None) -> None:
        self.path, self.hub = path, dict(hub or {})

    def find(self, name: str) -> Path | None:
        """Find the file `name`; `None` where there is none.

        Raises:
            CheckpointError: there is no such folder, or it cannot be read.
        """
        shown = os.fspath(self.path)
        try:
            file = cached_file(shown, name, _raise_exceptions_for_missing_entries=False, **self.hub)
        except OSError as error:
            if is_missing_folder(self.path):
                rule = "`path` must be an existing folder, but there is no"
                raise CheckpointError(f"{rule} {shown!r}. Check the spelling.") from error
            if not Path(self.path).exists():
                raise CheckpointError(said_of_hub(self.path, first_line(error))) from error
            raise CheckpointError(f"{shown!r} cannot be read: {error}") from error
        return None if file is None else Path(file)

    def file(self, name: str) -> Path:
        """Find the file `name`.

        Raises:
            CheckpointError: there is none.
        """
        if (file := self.find(name)) is not None:
            return file
        remedy = "Pass the folder or the hub name of a draft head."
        if not Path(self.path).exists():
            raise CheckpointError(said_of_hub(self.path, f"no {name} was found. {remedy}"))
        raise CheckpointError(f"{os.fspath(self.path)!r} has no {name}. {remedy}")

    def values(self) -> dict[str, Any]:
        """Read config.json.

        Raises:
            CheckpointError: there is none, or it is damaged.
        """
        return _json_object(self.file(CONFIG))

    def values_or_empty(self) -> dict[str, Any]:
        """Read config.json; empty where there is no such file, or it cannot be read."""
        try:
            return self.values()
        except CheckpointError:
            return {}

    @contextlib.contextmanager
    def describing_a_head(self) -> Iterator[None]:
        """Let errors that come from odd values in config.json name the file."""
        file = self.file(CONFIG)
        try:
            yield
        except ConfigError as error:
            remedy = f"{error.remedy} It is in {str(file)!r}."
            raise ConfigError(error.field, error.rule, error.value, remedy) from error
        except SpecError:
            raise
        except (AttributeError, LookupError, RuntimeError, TypeError, ValueError) as error:
            rule = "must describe a draft head, but does not"
            raise CheckpointError(f"{str(file)!r} {rule}: {first_line(error)}") from error

    def weights(self) -> dict[str, torch.Tensor]:
        """Read all weights.

        Raises:
            CheckpointError: there are none, or they are damaged.
        """
        for name in WEIGHTS:
            if (file := self.find(name)) is not None:
                return read_tensors(file)
        raise CheckpointError(f"{os.fspath(self.path)!r} has none of {', '.join(WEIGHTS)}.")

    def fill(
        self,
        head: DraftHead,
        weights: Mapping[str, torch.Tensor],
        *,
        dtype: torch.dtype | None,
    ) -> None:
        """Load `weights` into `head`, ready to draft.

        Args:
            dtype: of the weights; by default that of the largest.

        Raises:
            CheckpointError: weights are missing, left over or of another shape; both sizes are named.
        """
        wanted = head.state_dict()
        problems = [f"{name} is missing" for name in wanted if name not in weights]
        problems += [f"{name} is not part of such a head" for name in weights if name not in wanted]
        for name, weight in weights.items():
            if name in wanted and weight.shape != wanted[name].shape:
                problems.append(f"{name} is {tuple(weight.shape)}, but config.json says {tuple(wanted[name].shape)}")
        if problems:
            shown = "; ".join(problems[:4]) + (f"; and {len(problems) - 4} more" if len(problems) > 4 else "")
            message = f"The weights of {os.fspath(self.path)!r} are not those of its config.json"
            raise CheckpointError(f"{message}: {shown}.")
        head.load_state_dict(weights)
        floating = [weight for weight in weights.values() if weight.is_floating_point()]
        head.to(dtype or max(floating, key=torch.Tensor.numel).dtype)
        head.eval().requires_grad_(False)
        head.name_or_path = os.fspath(self.path)


def write_head(
    folder: str | os.PathLike[str], head: DraftHead, values: Mapping[str, Any], weights: Mapping[str, torch.Tensor]
) -> None:
    """Write `folder`/config.json and `folder`/model.safetensors.

    Args:
        values: of config.json; the dtype is added.

    Raises:
        OSError: they cannot be written; a file that was there stays as it is.
    """
    target = Path(folder)
    target.mkdir(parents=True, exist_ok=True)
    whole = {name: weight.detach().cpu().contiguous() for name, weight in weights.items()}
    try:
        with replacing(target / WEIGHTS[0]) as temporary:
            save_file(whole, temporary, metadata={"format": "pt"})
    except (SafetensorError, RuntimeError) as error:
        reason = f"{str(target / WEIGHTS[0])!r} cannot be written whole, as on a full disk: {first_line(error)}"
        raise OSError(reason) from error
    with replacing(target / CONFIG) as temporary:
        named = {**values, "dtype": str(head.dtype).removeprefix("torch.")}
        temporary.write_text(json.dumps(named, indent=2) + "\n", "utf-8")


def read_tensors(file: Path) -> dict[str, torch.Tensor]:
    """Read the tensors of a safetensors file or of one that torch has saved.

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


def _json_object(file: Path) -> dict[str, Any]:
    """Read a file's JSON object; a `CheckpointError` where it holds something else."""
    try:
        values = json_value(file.read_text("utf-8"))
    except UnicodeDecodeError:
        values = None
    if not isinstance(values, dict):
        raise CheckpointError(f"{str(file)!r} must hold a JSON object, but does not. Is it damaged?")
    return values
