"""A `custom_generate` folder for the hub: `spec_method` for everyone who loads it, without `enable`.

hf_specdec.loading.hub.export("my-generate", spec_method="auto")
model.generate(**inputs, custom_generate="my-generate", trust_remote_code=True, max_new_tokens=64)
"""

import dataclasses
import json
import os
import uuid
from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

from huggingface_hub import ModelCard, ModelCardData
from huggingface_hub.errors import HFValidationError
from transformers import PreTrainedModel

from hf_specdec import compat
from hf_specdec.call.arguments import own_arguments
from hf_specdec.call.run import generate_once
from hf_specdec.common.files import check_path
from hf_specdec.compat.hub_files import cached_file, validate_repo_id
from hf_specdec.engine.model_state import state_of
from hf_specdec.errors import CheckpointError, ConfigError, first_line
from hf_specdec.loading.auto import AutoDraftHead
from hf_specdec.methods.auto.method import give_memory
from hf_specdec.methods.auto.spec_memory import SpecMemory
from hf_specdec.methods.common.draft_head import DraftHead
from hf_specdec.methods.common.entry import MethodState
from hf_specdec.methods.eagle3.checkpoint import save_head
from hf_specdec.methods.eagle3.network import Eagle3Head
from hf_specdec.methods.registry import resolve

FOLDER = "custom_generate"
HEAD, MEMORY, CONTENTS = "head", "memory.safetensors", "contents.json"  # next to the script
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
    head: DraftHead | str | os.PathLike[str] | None = None,
    memory: SpecMemory | str | os.PathLike[str] | None = None,
    repo_id: str | None = None,
) -> Path:
    """Write a `custom_generate` repository, or add one to a checkpoint folder.

    Args:
        folder (`str`): made if it is not there. A README that is there keeps its text and gets the tag
            `custom_generate`.
        spec_method (`str`, *optional*, defaults to `"auto"`): of calls that name none.
        spec_config (*optional*): its configuration, as an object, a dict or a list.
        head (*optional*): a draft head, its folder or its hub name. It is written next to the script, and drafts where
            the method takes a head and the call brings no `assistant_model`.
        memory (*optional*): a `SpecMemory`, or the file of one, which `auto` drafts from. It holds the token ids of
            texts: publish it only where the texts may be published.
        repo_id (`str`, *optional*): where head and memory will be found, `"user/name"` on the hub. By default in
            `folder` as it is now, or in the folder or repository that the model was loaded from.

    Returns:
        The folder.

    Raises:
        ConfigError: an unknown method or a wrong configuration, a head or memory that the method has no use for, or a
            `generate.py` that is somebody else's; or a README.md whose metadata cannot be read. Nothing is written.
        CheckpointError: the head cannot be read.
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
    head, memory = _head_of(head, method.name), _memory_of(memory, method.name)
    card = _tagged(root / "README.md", method.name, repo_id or root.resolve().name)
    script.parent.mkdir(parents=True, exist_ok=True)
    for name in (f"{HEAD}/config.json", f"{HEAD}/model.safetensors", MEMORY, CONTENTS):  # of an earlier export
        (script.parent / name).unlink(missing_ok=True)
    if head is not None or memory is not None:
        defaults["contents"] = _write(script.parent, head, memory) | {"source": repo_id or str(root.resolve())}
    script.write_text(SCRIPT.format(defaults=json.dumps(defaults)), "utf-8")
    (script.parent / "requirements.txt").write_text(f"hf_specdec>={version('hf_specdec')}\n", "utf-8")
    card.save(root / "README.md")
    return root


def _head_of(head: DraftHead | str | os.PathLike[str] | None, method: str) -> Eagle3Head | None:
    """The head, loaded.

    Raises:
        ConfigError: the method has no use for it, or it is none that is written.
    """
    if head is None:
        return None
    if not isinstance(head, DraftHead):
        check_path("head", head, "a draft head, its folder or its hub name")
        head = AutoDraftHead.from_pretrained(head)
    if method not in head.methods:
        rule, remedy = f"must be unset with spec_method={method!r}", f"It drafts with {', '.join(head.methods)}."
        raise ConfigError("head", rule, type(head).__name__, remedy)
    if not isinstance(head, Eagle3Head):
        raise ConfigError("head", "must be an EAGLE-3 head", type(head).__name__, "Train one: hf-specdec train.")
    return head


def _memory_of(memory: SpecMemory | str | os.PathLike[str] | None, method: str) -> SpecMemory | None:
    """The memory, loaded.

    Raises:
        ConfigError: the method has no use for it, or it cannot be read.
    """
    if memory is None:
        return None
    if method != "auto":
        rule = f"must be unset with spec_method={method!r}"
        raise ConfigError("memory", rule, type(memory).__name__, 'Use spec_method="auto".')
    if isinstance(memory, SpecMemory):
        return memory
    check_path("memory", memory, "a SpecMemory, or the file of one")
    return SpecMemory.load(memory)


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
        defaults: method and configuration of calls that name neither, and what travels with the script.
        kwargs: as for an enabled model's `generate`.

    Raises:
        CheckpointError: head or memory are not where the export says.
    """
    inner: PreTrainedModel = compat.generation_model(model)
    own = {name: value for name, value in defaults.items() if name != "contents"}
    named = (kwargs.keys() & own_arguments()) - {"spec_observer"}
    if not named:
        kwargs = {**own, **kwargs}
    elif named == {"spec_config"}:
        kwargs["spec_method"] = defaults["spec_method"]
    if "contents" in defaults and isinstance(kwargs.get("spec_method"), str):
        kwargs = _with_contents(inner, defaults["contents"], kwargs)
    return generate_once(inner, {name: value for name, value in kwargs.items() if value is not None or name in named})


def _write(folder: Path, head: Eagle3Head | None, memory: SpecMemory | None) -> dict[str, Any]:
    """Put head and memory next to the script; returns what there is, under a name by which it is known again."""
    if head is not None:
        save_head(head, folder / HEAD)
    if memory is not None:
        memory.save(folder / MEMORY)
    contents = {"id": uuid.uuid4().hex, "head": head is not None, "memory": memory is not None}
    (folder / CONTENTS).write_text(json.dumps(contents) + "\n", "utf-8")
    return contents


def _with_contents(model: PreTrainedModel, contents: Mapping[str, Any], kwargs: dict[str, Any]) -> dict[str, Any]:
    """The call with head and memory in it, each where the method takes it; they are read once for a model."""
    method = resolve(kwargs["spec_method"])
    kept = state_of(model).method_state
    found = dict(kwargs)
    if contents["memory"] and method.name == "auto":
        found["spec_method"] = method.with_state(
            kept.of(f"hub, memory {contents['id']}", lambda: _memory(_source(model, contents)))
        )
    if contents["head"] and method.takes_draft_head and kwargs.get("assistant_model") is None:
        subfolder = f"{FOLDER}/{HEAD}"
        head = kept.of(
            f"hub, head {contents['id']}",
            lambda: AutoDraftHead.from_pretrained(_source(model, contents), subfolder=subfolder),
        )
        if method.name in head.methods:
            found["assistant_model"] = head
    return found


def _memory(source: str) -> MethodState:
    state = MethodState()
    give_memory(state, SpecMemory.load(str(cached_file(source, f"{FOLDER}/{MEMORY}"))))
    return state


def _source(model: PreTrainedModel, contents: Mapping[str, Any]) -> str:
    """The folder or the repository that head and memory are in: the export's own, or the model's.

    Raises:
        CheckpointError: they are in neither.
    """
    places = [str(contents["source"]), str(model.config.name_or_path)]
    for place in places:
        if not place:
            continue
        try:
            file = cached_file(place, f"{FOLDER}/{CONTENTS}", _raise_exceptions_for_missing_entries=False)
        except OSError:
            continue
        if file is not None and json.loads(Path(file).read_text("utf-8"))["id"] == contents["id"]:
            return place
    raise CheckpointError(
        f"{FOLDER} was exported with a head or a memory, but they are in none of {places}. Export it again where it is "
        "now, or with repo_id=."
    )


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
