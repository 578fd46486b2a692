"""Settings of generation that transformers does not know, saved and loaded with its own."""

import json
from pathlib import Path
from typing import Any

from transformers import GenerationConfig

from hf_specdec.compat.hub_files import cached_file

__all__ = ["dropped_settings", "keep_own_settings", "leave_own_settings"]


def keep_own_settings(generation_config: GenerationConfig) -> bool:
    """Let settings that transformers does not know survive saving and loading; returns whether that had to be set.

    Where a configuration was made from the model's own, loading it drops them; nothing else depends on that mark.
    """
    was_marked = bool(generation_config._from_model_config)
    if was_marked:
        generation_config._from_model_config = False
    return was_marked


def leave_own_settings(generation_config: GenerationConfig) -> None:
    """Undo `keep_own_settings`."""
    generation_config._from_model_config = True


def dropped_settings(generation_config: GenerationConfig, path: str, **hub_arguments: Any) -> dict[str, Any]:
    """Settings in a checkpoint's generation configuration that loading it dropped."""
    try:
        found = cached_file(path, "generation_config.json", **hub_arguments)
        saved = json.loads(Path(found).read_text("utf-8"))
    except (OSError, ValueError):  # there is none that could be read
        return {}
    if not isinstance(saved, dict) or not saved.get("_from_model_config"):
        return {}
    return {name: value for name, value in saved.items() if not hasattr(generation_config, name)}
