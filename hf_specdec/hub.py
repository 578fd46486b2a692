"""A `custom_generate` folder for the hub: `spec_method` for everyone who loads it, without `enable`.

hf_specdec.hub.export("my-generate", spec_method="auto")
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
from transformers import PreTrainedModel

from hf_specdec import compat
from hf_specdec.errors import ConfigError
from hf_specdec.generation import generate_once
from hf_specdec.methods.registry import resolve
from hf_specdec.request import own_arguments

__all__ = ["export", "generate"]

FOLDER = "custom_generate"
TAG = "custom_generate"
SCRIPT = '''\
"""Speculative decoding: the text of transformers' own `generate`, sooner. Written by hf_specdec.hub.export."""

import json

from hf_specdec import hub

DEFAULTS = json.loads({defaults!r})


def generate(model, **kwargs):
    """As `GenerationMixin.generate`, with `spec_method`, `spec_config` and the list forms of hf_specdec."""
    return hub.generate(model, DEFAULTS, **kwargs)
'''
CARD = """\
# Speculative decoding for `generate`

The text of transformers' own `generate`, sooner, with [hf_specdec](https://pypi.org/project/hf_specdec/).

```python
model.generate(**inputs, custom_generate="{name}", trust_remote_code=True, max_new_tokens=64)
```

`spec_method` is {method!r} unless the call names another; `spec_config` and the list forms work as in hf_specdec.
"""


def export(folder: str | os.PathLike[str], *, spec_method: str = "auto", spec_config: Any = None) -> Path:
    """Write a `custom_generate` repository, or add one to a checkpoint folder.

    Args:
        folder: made if it is not there. A README that is there keeps its text and gets the tag `custom_generate`.
        spec_method (`str`, *optional*, defaults to `"auto"`): of calls that name none.
        spec_config (*optional*): its configuration, as an object, a dict or a list.

    Returns:
        The folder.

    Raises:
        ConfigError: an unknown method or a wrong configuration, or a `generate.py` that is somebody else's.
    """
    method = resolve(spec_method)
    defaults: dict[str, Any] = {"spec_method": method.name}
    if spec_config is not None:
        defaults["spec_config"] = dataclasses.asdict(method.config_class.parse(spec_config))
    root = Path(folder)
    script = root / FOLDER / "generate.py"
    if script.exists() and "hf_specdec.hub.export" not in script.read_text("utf-8"):
        remedy = "Choose another folder, or move the file away."
        raise ConfigError("folder", f"must have no {FOLDER}/generate.py of another author", str(folder), remedy)
    script.parent.mkdir(parents=True, exist_ok=True)
    script.write_text(SCRIPT.format(defaults=json.dumps(defaults)), "utf-8")
    (script.parent / "requirements.txt").write_text(f"hf_specdec>={version('hf_specdec')}\n", "utf-8")
    _tag(root / "README.md", method.name)
    return root


def generate(model: Any, defaults: Mapping[str, Any], /, **kwargs: Any) -> Any:
    """What the exported script calls: `generate` with `spec_method`; the model stays as it is.

    Args:
        model: a transformers model.
        defaults: method and configuration of calls that name neither.
        kwargs: as for an enabled model's `generate`.
    """
    inner: PreTrainedModel = compat.generation_model(model)
    named = (kwargs.keys() & own_arguments()) - {"spec_observer"}
    if not named:
        kwargs = {**defaults, **kwargs}
    elif named == {"spec_config"}:
        kwargs["spec_method"] = defaults["spec_method"]
    return generate_once(inner, {name: value for name, value in kwargs.items() if value is not None or name in named})


def _tag(readme: Path, method: str) -> None:
    """A model card with the tag by which the hub finds such repositories."""
    if readme.exists():
        card = ModelCard.load(readme)
    else:
        data = ModelCardData(library_name="transformers")
        card = ModelCard(f"---\n{data.to_yaml()}\n---\n\n" + CARD.format(name=readme.parent.name, method=method))
    tags = list(card.data.tags or [])
    card.data.tags = tags if TAG in tags else [*tags, TAG]
    card.save(readme)
