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
import tempfile
from pathlib import Path

from hf_specdec.common.model_cache import cache_folder, check_cache
from hf_specdec.errors import CheckpointError, unknown_name

PACKAGE = "hf_specdec_models"
WEIGHTS = "packed.safetensors"
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
    with (source / WEIGHTS).open("rb") as file:
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
    for folder in (Path(__file__).parents[3] / "demos" / "models" / PACKAGE, *installed):
        if all((folder / name / WEIGHTS).is_file() for name in NAMES):
            return folder
    rule = f"The embedded models are the package {PACKAGE}, which is not installed."
    raise CheckpointError(f"{rule} {REMEDY}")


def _write_checkpoint(source: Path, checkpoint: Path) -> None:
    """Writes the checkpoint in a temporary folder, which takes its place in one step unless another process has."""
    from hf_specdec.loading.embedded.packed import unpack  # torch, which naming a folder does not need

    check_cache(checkpoint.parent)
    with tempfile.TemporaryDirectory(dir=checkpoint.parent) as folder:
        unpack(source, Path(folder) / source.name)
        try:
            os.rename(Path(folder) / source.name, checkpoint)
        except OSError:
            if not checkpoint.is_dir():
                raise
