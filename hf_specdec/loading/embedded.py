"""The embedded models: a small target, a smaller draft, an EAGLE-3 head and their tokenizer, which need no network.

The folder `demos/models` of a clone holds them, and the distribution `hf_specdec_models`, which is the extra `models`.

`"smollm2-head"` is a head for the chat model that `hf_specdec.fetch("smollm2")` brings.

from transformers import AutoModelForCausalLM
model = AutoModelForCausalLM.from_pretrained(hf_specdec.embedded.path("target"))
head = hf_specdec.AutoDraftHead.from_pretrained(hf_specdec.embedded.path("head"))
"""

import hashlib
import importlib.util
import os
import shutil
import tempfile
from pathlib import Path

from hf_specdec.errors import CheckpointError, ConfigError, unknown_name

PACKAGE = "hf_specdec_models"
PACKED, WEIGHTS = "packed.safetensors", "model.safetensors"
SCALE = ".scale"  # ends the name of the scales of a matrix, which is int8 with one fp16 scale a row
NAMES = ("draft", "head", "smollm2-head", "target")
REMEDY = 'Install it with: pip install "hf_specdec[models]" (in a clone: pip install ./demos/models)'
DIGITS = 12  # of the digest of the packed weights, which names the folder of the checkpoint


def path(name: str) -> str:
    """Folder of the embedded `"target"`, `"draft"`, `"head"` or `"smollm2-head"`, for `from_pretrained`.

    Their weights have 8 bits; the first call writes a bf16 checkpoint into the user's cache.

    Raises:
        ConfigError: `name` is none of them, or the cache cannot be written.
        CheckpointError: they are not installed; the message holds the install line.
    """
    if not isinstance(name, str) or name not in NAMES:
        raise unknown_name("name", name, NAMES)
    source = packed_folder() / name
    with (source / PACKED).open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    checkpoint = cache_folder() / f"embedded-{digest[:DIGITS]}" / name
    if not checkpoint.is_dir():
        _write_checkpoint(source, checkpoint)
    return str(checkpoint)


def packed_folder() -> Path:
    """Folder of the packed models: that of the clone, else that of the installed distribution.

    Raises:
        CheckpointError: they are not installed.
    """
    spec = importlib.util.find_spec(PACKAGE)
    installed = [] if spec is None else map(Path, spec.submodule_search_locations or ())
    for folder in (Path(__file__).parents[2] / "demos" / "models" / PACKAGE, *installed):
        if all((folder / name / PACKED).is_file() for name in NAMES):
            return folder
    rule = f"The embedded models are the package {PACKAGE}, which is not installed."
    raise CheckpointError(f"{rule} {REMEDY}")


def _write_checkpoint(source: Path, checkpoint: Path) -> None:
    """Writes the checkpoint in a temporary folder, which takes its place in one step unless another process has."""
    check_cache(checkpoint.parent)
    with tempfile.TemporaryDirectory(dir=checkpoint.parent) as folder:
        unpack(source, Path(folder) / source.name)
        try:
            os.rename(Path(folder) / source.name, checkpoint)
        except OSError:
            if not checkpoint.is_dir():
                raise


def unpack(source: Path, target: Path) -> None:
    """Writes the checkpoint of a packed folder: its other files as they are, and its weights in bf16."""
    from safetensors.torch import load_file, save_file  # torch, which naming a folder does not need

    shutil.copytree(source, target, ignore=shutil.ignore_patterns(PACKED))
    tensors = load_file(source / PACKED)
    weights = {name: tensor for name, tensor in tensors.items() if not name.endswith(SCALE)}
    for name, tensor in weights.items():
        if (scale := tensors.get(name + SCALE)) is not None:
            weights[name] = (tensor.float() * scale.float()).bfloat16()
    save_file(weights, target / WEIGHTS, metadata={"format": "pt"})


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
