"""The embedded models: a small target, a smaller draft, an EAGLE-3 head and their tokenizer, inside the package.

`"smollm2-head"` is a head for the chat model that `hf_specdec.fetch("smollm2")` brings.

from transformers import AutoModelForCausalLM
model = AutoModelForCausalLM.from_pretrained(hf_specdec.embedded.path("target"))
head = hf_specdec.AutoDraftHead.from_pretrained(hf_specdec.embedded.path("head"))
"""

import hashlib
import os
import tempfile
from pathlib import Path

from hf_specdec.common.model_cache import cache_folder, check_cache
from hf_specdec.errors import CheckpointError, unknown_name

NAMES = ("draft", "head", "smollm2-head", "target")
DIGITS = 12  # of the digest of the packed weights, which names the folder of the checkpoint


def path(name: str) -> str:
    """Folder of the embedded `"target"`, `"draft"`, `"head"` or `"smollm2-head"`, for `from_pretrained`.

    The package holds the weights in 8 bits; the first call writes a bf16 checkpoint into the user's cache.

    Raises:
        ConfigError: `name` is none of them, or the cache cannot be written.
        CheckpointError: the installed package lacks its weights.
    """
    if not isinstance(name, str) or name not in NAMES:
        raise unknown_name("name", name, NAMES)
    source = Path(__file__).parent / name
    weights = source / "packed.safetensors"
    if not weights.is_file():
        raise CheckpointError(f"The embedded {name} is missing at {source}. Install hf_specdec again from a wheel.")
    with weights.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    checkpoint = cache_folder() / f"embedded-{digest[:DIGITS]}" / name
    if not checkpoint.is_dir():
        _write_checkpoint(source, checkpoint)
    return str(checkpoint)


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
