"""Checks the folder of a checkpoint: an error names file, field, value and remedy. Loads no weights."""

import importlib.util
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import transformers
from huggingface_hub.errors import HFValidationError

from hf_specdec.common.files import check_path, is_missing_folder
from hf_specdec.compat.loading import validate_repo_id
from hf_specdec.errors import CheckpointError, ConfigError, first_line


def with_gguf_file(path: Any, arguments: Mapping[str, Any]) -> tuple[Any, dict[str, Any]]:
    """Folder and arguments of `from_pretrained` for a path of a GGUF file; any other path as it is."""
    if isinstance(path, str | os.PathLike) and os.fspath(path).endswith(".gguf") and Path(path).is_file():
        return str(Path(path).parent), {**arguments, "gguf_file": Path(path).name}
    return path, dict(arguments)


def check_folder(
    path: str | os.PathLike[str], auto_class: str, *, runs_code: bool = False, gguf_file: str | None = None
) -> None:
    """Say what is wrong with a local folder before transformers looks for its name on the hub.

    Args:
        auto_class: name of the class of transformers that is to load it.
        runs_code: whether it may load classes of the checkpoint's own code.
        gguf_file: a file of the folder with weights and configuration in GGUF.

    Raises:
        CheckpointError: it is missing, or its config.json is damaged.
        ConfigError: `path` is no path.
    """
    check_path("path", path, "a folder or a name on the hub")
    folder, text = Path(path), os.fspath(path)
    if is_missing_folder(path):
        hint = "Check the spelling; a name on the hub is written owner/name."
        raise CheckpointError(f"`path` must be an existing folder, but there is no {text!r}. {hint}")
    if not folder.exists():
        _check_name(text)
        return
    if folder.is_file() and folder.suffix.lower() == ".gguf":
        raise CheckpointError(f"`path` must end in .gguf where it is a GGUF file, but is {text!r}. Rename the file.")
    if not folder.is_dir():
        raise CheckpointError(f"`path` must be a folder, but {text!r} is a file. Give the folder that holds it.")
    if gguf_file is not None:
        if not (folder / gguf_file).is_file():
            raise CheckpointError(f"`gguf_file` must be a file of {text!r}, but there is no {gguf_file!r} in it.")
        return
    config = folder / "config.json"
    if (adapter := folder / "adapter_config.json").is_file() and not config.is_file():
        _check_adapter(adapter, auto_class, runs_code)
        return
    if not config.is_file():
        files = sorted(file.name for file in folder.iterdir() if file.suffix.lower() == ".gguf")
        hint = f"Name the file: {text}/{files[0]}" if files else "Is it a checkpoint?"
        raise CheckpointError(f"`path` must hold a config.json, but {text!r} does not. {hint}")
    try:
        content = json.loads(config.read_text("utf-8"))
    except (UnicodeDecodeError, json.JSONDecodeError, RecursionError) as error:
        raise CheckpointError(f"{str(config)!r} must be JSON, but is not: {first_line(error)}") from error
    model_type = content.get("model_type") if isinstance(content, dict) else None
    if isinstance(content, dict) and "AutoConfig" in (content.get("auto_map") or ()):
        return
    if not isinstance(model_type, str) or model_type not in transformers.CONFIG_MAPPING:
        raise CheckpointError(
            f"{str(config)!r} must name a model_type that transformers {transformers.__version__} knows, "
            f"but has {model_type!r}. Is it a transformers checkpoint?"
        )
    try:
        transformers.AutoConfig.from_pretrained(folder)
    except Exception as error:
        rule = f"must have values of a {model_type} model's fields"
        raise CheckpointError(f"{str(config)!r} {rule}, but has not: {' '.join(str(error).split())}") from error


def _check_name(text: str) -> None:
    """Say that a text is no name on the hub."""
    try:
        validate_repo_id(text)
    except HFValidationError as error:
        rule = "`path` must be an existing folder or a name on the hub"
        raise CheckpointError(f"{rule}, but {text!r} is neither. Check the spelling.") from error


def _check_adapter(config: Path, auto_class: str, runs_code: bool) -> None:
    """Say what is wrong with a folder of a PEFT adapter, and with the model that it is an adapter of."""
    if importlib.util.find_spec("peft") is None:
        raise CheckpointError(f"{str(config.parent)!r} holds an adapter, which needs `peft`: pip install peft")
    try:
        base = json.loads(config.read_text("utf-8"))["base_model_name_or_path"]
    except (ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{str(config)!r} must name its base_model_name_or_path.") from error
    if isinstance(base, str) and base:
        check_folder(base, auto_class, runs_code=runs_code)


def check_kind(auto_class: str, path: str | os.PathLike[str], error: ValueError) -> None:
    """Raise where transformers' error lists all models that a class loads, because a checkpoint is none of them.

    Raises:
        ConfigError: names the model's kind.
    """
    if not str(error).startswith("Unrecognized configuration class"):
        return
    config = transformers.AutoConfig.from_pretrained(path)
    remedy = "AutoModelForSeq2SeqLM loads it, in Python." if config.is_encoder_decoder else "Choose another model."
    if type(config) in transformers.MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING:
        remedy = "transformers.AutoModelForSpeechSeq2Seq loads it, and enable(model) gives it spec_method."
    value = f"{os.fspath(path)} ({config.model_type})"
    raise ConfigError("model", f"must be one that {auto_class} loads", value, remedy) from error
