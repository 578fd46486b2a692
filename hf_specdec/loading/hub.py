"""A `custom_generate` folder for the hub: `spec_method` for everyone who loads it, without `enable`.

hf_specdec.loading.hub.export("my-generate", spec_method="auto")
model.generate(**inputs, custom_generate="my-generate", trust_remote_code=True, max_new_tokens=64)
"""

import dataclasses
import json
import os
from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel

from hf_specdec.call.arguments import added_arguments
from hf_specdec.call.generate import generate_once
from hf_specdec.common.files import check_path
from hf_specdec.compat.models import generation_model
from hf_specdec.errors import ConfigError
from hf_specdec.methods.registry import resolve

FOLDER = "custom_generate"
SCRIPT = '''\
"""Speculative decoding: the text of transformers' own `generate`, sooner. Written by hf_specdec.loading.hub.export."""

import json

from hf_specdec.loading import hub

DEFAULTS = json.loads({defaults!r})


def generate(model, **kwargs):
    """As `GenerationMixin.generate`, with `spec_method`, `spec_config` and the list forms of hf_specdec."""
    return hub.generate(model, DEFAULTS, **kwargs)
'''


def export(
    folder: str | os.PathLike[str],
    *,
    spec_method: str = "auto",
    spec_config: Any = None,
) -> Path:
    """Write a `custom_generate` repository, or add one to a checkpoint folder.

    Args:
        folder (`str`): made if it is not there. The hub finds such repositories by the tag `custom_generate` in their
            README.md, which is left to you.
        spec_method (`str`, *optional*, defaults to `"auto"`): of calls that name none.
        spec_config (*optional*): its configuration, as an object, a dict or a list.

    Returns:
        The folder.

    Raises:
        ConfigError: an unknown method or a wrong configuration, or a `generate.py` that is somebody else's. Nothing is
            written.
    """
    check_path("folder", folder, "a folder")
    method = resolve(spec_method)
    defaults: dict[str, Any] = {"spec_method": method.name}
    if spec_config is not None:
        defaults["spec_config"] = dataclasses.asdict(method.config_class.parse(spec_config))
    root = Path(folder)
    script = root / FOLDER / "generate.py"
    if root.exists() and not root.is_dir():
        raise ConfigError("folder", "must be a folder, or a name that is free", str(folder), "Choose another name.")
    if script.exists() and b"hf_specdec.loading.hub.export" not in script.read_bytes():
        remedy = "Choose another folder, or move the file away."
        raise ConfigError("folder", f"must have no {FOLDER}/generate.py of another author", str(folder), remedy)
    script.parent.mkdir(parents=True, exist_ok=True)
    script.write_text(SCRIPT.format(defaults=json.dumps(defaults)), "utf-8")
    (script.parent / "requirements.txt").write_text(f"hf_specdec>={version('hf_specdec')}\n", "utf-8")
    return root


def generate(model: Any, defaults: Mapping[str, Any], /, **kwargs: Any) -> Any:
    """Entry point of the exported script: `generate` with `spec_method`; the model stays as it is.

    Args:
        model: a transformers model.
        defaults: method and configuration of calls that name neither.
        kwargs: as for an enabled model's `generate`.
    """
    inner: PreTrainedModel = generation_model(model)
    named = (kwargs.keys() & added_arguments()) - {"spec_observer"}
    if not named:
        kwargs = {**defaults, **kwargs}
    elif named == {"spec_config"}:
        kwargs["spec_method"] = defaults["spec_method"]
    return generate_once(inner, {name: value for name, value in kwargs.items() if value is not None or name in named})
