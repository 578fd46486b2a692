"""Folder of the user's cache that holds models: fetched ones, and checkpoints of the embedded ones."""

import os
import tempfile
from pathlib import Path

from hf_specdec.errors import ConfigError


def cache_folder() -> Path:
    """Folder of the user's cache that holds models."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "hf_specdec" / "models"


def check_cache(folder: Path, or_else: str = "") -> None:
    """Make a folder for models, and raise where files cannot be written in it.

    Args:
        or_else: another remedy than XDG_CACHE_HOME, with the words that join it.

    Raises:
        ConfigError: names `folder`.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=folder).close()
    except OSError as error:
        remedy = f"{error.strerror}. Set XDG_CACHE_HOME to a folder that can be{or_else}."
        raise ConfigError("folder", "must be where files can be written", str(folder), remedy) from error
