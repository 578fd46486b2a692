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

from huggingface_hub import ModelCard, ModelCardData
from huggingface_hub.errors import HFValidationError
from transformers import PreTrainedModel

from hf_specdec import compat
from hf_specdec.call.arguments import added_arguments
from hf_specdec.call.generate import generate_once
from hf_specdec.common.files import check_path
from hf_specdec.compat.loading import validate_repo_id
from hf_specdec.errors import ConfigError, first_line
from hf_specdec.methods.registry import resolve

FOLDER = "custom_generate"
TAG = "custom_generate"
SCRIPT = '''\
"""Speculative decoding: the text of transformers' own `generate`, sooner. Written by hf_specdec.loading.hub.export."""

import json

from hf_specdec.loading import hub

DEFAULTS = json.loads({defaults!r})


def generate(model, **kwargs):
    """As `GenerationMixin.generate`, with `spec_method`, `spec_config` and the list forms of hf_specdec."""
    return hub.generate(model, DEFAULTS, **kwargs)
'''
CARD = """\
# Speculative decoding for `generate`

The text of transformers' own `generate`, sooner, with the Python package `hf_specdec`.

```python
model.generate(**inputs, custom_generate="{name}", trust_remote_code=True, max_new_tokens=64)
```

`spec_method` is {method!r} unless the call names another; `spec_config` and the list forms work as in hf_specdec.
"""


def export(
    folder: str | os.PathLike[str],
    *,
    spec_method: str = "auto",
    spec_config: Any = None,
    repo_id: str | None = None,
) -> Path:
    """Write a `custom_generate` repository, or add one to a checkpoint folder.

    Args:
        folder (`str`): made if it is not there. A README that is there keeps its text and gets the tag
            `custom_generate`.
        spec_method (`str`, *optional*, defaults to `"auto"`): of calls that name none.
        spec_config (*optional*): its configuration, as an object, a dict or a list.
        repo_id (`str`, *optional*): `"user/name"` on the hub, which a new README names. By default the folder's name.

    Returns:
        The folder.

    Raises:
        ConfigError: an unknown method or a wrong configuration, a `generate.py` that is somebody else's, or a README.md
            whose metadata cannot be read. Nothing is written.
    """
    check_path("folder", folder, "a folder")
    _check_repo(repo_id)
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
    card = _tagged(root / "README.md", method.name, repo_id or root.resolve().name)
    script.parent.mkdir(parents=True, exist_ok=True)
    script.write_text(SCRIPT.format(defaults=json.dumps(defaults)), "utf-8")
    (script.parent / "requirements.txt").write_text(f"hf_specdec>={version('hf_specdec')}\n", "utf-8")
    card.save(root / "README.md")
    return root


def _check_repo(repo_id: str | None) -> None:
    """Raise unless a name can be one of the hub's, if it is given."""
    if repo_id is None:
        return
    try:
        validate_repo_id(repo_id)
    except HFValidationError as error:
        rule = "must be a name on the hub"
        raise ConfigError("repo_id", rule, repo_id, 'Write "user/name", without an address before it.') from error


def generate(model: Any, defaults: Mapping[str, Any], /, **kwargs: Any) -> Any:
    """Entry point of the exported script: `generate` with `spec_method`; the model stays as it is.

    Args:
        model: a transformers model.
        defaults: method and configuration of calls that name neither.
        kwargs: as for an enabled model's `generate`.
    """
    inner: PreTrainedModel = compat.generation_model(model)
    named = (kwargs.keys() & added_arguments()) - {"spec_observer"}
    if not named:
        kwargs = {**defaults, **kwargs}
    elif named == {"spec_config"}:
        kwargs["spec_method"] = defaults["spec_method"]
    return generate_once(inner, {name: value for name, value in kwargs.items() if value is not None or name in named})


def _tagged(readme: Path, method: str, name: str) -> Any:
    """The model card, or a new one, with the tag by which the hub finds such repositories.

    Args:
        name: by which a new card says to load the method.

    Raises:
        ConfigError: the card that is there cannot be read.
    """
    card: Any
    if readme.exists():
        try:
            card = ModelCard.load(readme)
        except Exception as error:  # YAML's own errors, ValueErrors, and those of files
            rule = f"must have a README.md that is UTF-8 and begins with valid YAML, if any ({first_line(error)})"
            raise ConfigError("folder", rule, str(readme.parent), "Repair the README.md, or move it away.") from error
    else:
        data = ModelCardData(library_name="transformers")
        card = ModelCard(f"---\n{data.to_yaml()}\n---\n\n" + CARD.format(name=name, method=method))
    tags = list(card.data.tags or [])
    card.data.tags = tags if TAG in tags else [*tags, TAG]
    return card
