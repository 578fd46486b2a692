"""The folder of a training's work: one training at a time writes there, and goes on with work of its settings alone."""

import contextlib
import errno
import hashlib
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from hf_specdec.common.files import lock, replacing
from hf_specdec.errors import CheckpointError, ConfigError, first_line
from hf_specdec.tools.train.chats import Chats
from hf_specdec.tools.train.config import Training
from hf_specdec.tools.train.student import Student

FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)  # of a disk, a quota, the largest file that may be
NUM_SAMPLED = 16  # values of a weight that tell it from another model's
Settings = dict[str, Any]


def check_folder(out: str | os.PathLike[str], *models: Any) -> None:
    """Refuse to write a model over one that no training of this folder has made.

    Args:
        models: those that the training reads; `None` is none.

    Raises:
        ConfigError: the folder is one of theirs, or holds a model and no work.
    """
    shown, remedy = os.fspath(out), "Choose another folder."
    for model in models:
        place = str(getattr(model, "name_or_path", "") or "")
        if place and os.path.realpath(place) == os.path.realpath(out):
            raise ConfigError("out", "must not be the folder of a model that the training reads", shown, remedy)
    files = list(Path(out).iterdir()) if Path(out).is_dir() else []
    is_model = any(file.name == "config.json" or file.suffix in (".safetensors", ".bin") for file in files)
    if is_model and not (Path(out) / "work" / "settings.json").exists():
        raise ConfigError("out", "must be a new folder, or one of a training, and holds a model", shown, remedy)


@contextlib.contextmanager
def held(work: Path) -> Iterator[None]:
    """Make the folder, and keep other trainings out of it; one process of a training does this for all.

    Raises:
        ConfigError: another training writes there, or it cannot be written.
        OSError: names the folder: the disk is full.
    """
    shown, remedy = str(work.parent), "Choose another folder."
    try:
        work.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(work, os.O_RDONLY)
    except OSError as error:
        raise ConfigError("out", f"must be a folder that can be written ({error.strerror})", shown, remedy) from error
    try:
        try:
            lock(descriptor)
        except BlockingIOError as error:
            rule = "must not be the folder of a training that runs"
            raise ConfigError("out", rule, shown, "Wait until it has ended, or choose another folder.") from error
        with _naming(shown):
            yield
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def _naming(folder: str) -> Iterator[None]:
    """Errors of a full disk name the folder; the system's own name no file where one is open already."""
    try:
        yield
    except OSError as error:
        if error.filename is None and error.errno in FULL:
            error.filename = folder
        raise


def settings_of(
    target: PreTrainedModel,
    prompts: Chats | Mapping[int, Sequence[Sequence[int]]] | None,
    config: Training,
    student: Student[Any, Any],
) -> Settings:
    """Settings that the texts, the draft's shape and its first weights depend on: other work is not continued.

    Args:
        prompts: chats, or token ids of the prompts by their length; `None` where the target writes from its first
            token on.
    """
    values: Settings = {"kind": config.kind}
    values |= {name: getattr(config, name) for name in config.of_texts}
    values |= {"prompt_tokens": list(config.prompt_lengths), "temperatures": list(config.temperatures)}
    return values | {
        "layer_ids": list(student.layer_ids),
        "target": type(target).__name__,
        "num_parameters": target.num_parameters(),
        "weights": _weights_digest(target),
        "head": None if student.head is None else _weights_digest(student.head),
        "prompts": None if prompts is None else _described(prompts),
    }


def begin(work: Path, settings: Settings) -> None:
    """Note the settings, or check that the work there is of the same.

    Raises:
        ConfigError: it is of others.
        CheckpointError: they cannot be read.
    """
    file = work / "settings.json"
    if not file.exists():
        with replacing(file) as temporary:
            temporary.write_text(json.dumps(settings, indent=2) + "\n", "utf-8")
        return
    try:
        old = {"kind": settings.get("kind"), **json.loads(file.read_text("utf-8"))}  # it may name no kind
    except (ValueError, TypeError) as error:
        raise CheckpointError(
            f"{str(file)!r} cannot be read: {first_line(error)} Delete {str(work)!r} to begin anew."
        ) from error
    for name, value in settings.items():
        if old.get(name) != value:
            rule = f"must be {old.get(name)!r} to go on with the work in {str(work)!r}"
            raise ConfigError(name, rule, value, "Use another folder, or delete that one.")


def _weights_digest(module: nn.Module) -> str:
    """Stands for the weights of a model, in 16 or 32 bits alike; those that no memory holds are left out."""
    values = []
    for name, weight in module.named_parameters():
        if not weight.is_meta:
            some = weight.detach().flatten()[:NUM_SAMPLED].to(torch.bfloat16).float()
            values.append((name, some.tolist()))
    return _digest(repr(values))


def _described(prompts: Chats | Mapping[int, Sequence[Sequence[int]]]) -> str:
    if isinstance(prompts, Chats):
        first = prompts.ids_of(prompts.shards[0][0][:1])  # the template is told by what it makes of a message
        return f"{prompts.num_used} chats, of digest {_digest(json.dumps([prompts.shards, first]))}"
    counts = " and ".join(str(len(pieces)) for pieces in prompts.values())
    return f"{counts} pieces, of digest {_digest(json.dumps(prompts))}"


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]
