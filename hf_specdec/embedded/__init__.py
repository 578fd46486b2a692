"""The embedded pair: a small target, a smaller draft and their tokenizer, inside the package.

from transformers import AutoModelForCausalLM
model = AutoModelForCausalLM.from_pretrained(hf_specdec.embedded.path("target"))
"""

from pathlib import Path

from hf_specdec.errors import CheckpointError, unknown_name

__all__ = ["path"]

NAMES = ("draft", "target")


def path(name: str) -> str:
    """Folder of the embedded `"target"` or `"draft"`, for `from_pretrained`.

    Raises:
        ConfigError: `name` is neither.
        CheckpointError: the installed package lacks its weights.
    """
    if name not in NAMES:
        raise unknown_name("name", name, NAMES)
    folder = Path(__file__).parent / name
    if not (folder / "model.safetensors").is_file():
        raise CheckpointError(f"The embedded {name} is missing at {folder}. Install hf_specdec again from a wheel.")
    return str(folder)
