"""Settings of generation that transformers does not know, saved and loaded with its own."""

import json
from pathlib import Path
from typing import Any

from transformers import GenerationConfig
from transformers.utils import cached_file

__all__ = ["dropped_settings", "keep_own_settings"]


def keep_own_settings(generation_config: GenerationConfig) -> None:
    """Let settings that transformers does not know survive saving and loading.

    Where a configuration was made from the model's own, loading it drops them; nothing else depends on that mark.
    """
    if generation_config._from_model_config:
        generation_config._from_model_config = False


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
