"""The embedded models: a small target, a smaller draft, an EAGLE-3 head and their tokenizer, inside the package.

`"smollm2-head"` is a head for the chat model that `hf_specdec.fetch("smollm2")` brings.

from transformers import AutoModelForCausalLM
model = AutoModelForCausalLM.from_pretrained(hf_specdec.embedded.path("target"))
head = hf_specdec.AutoDraftHead.from_pretrained(hf_specdec.embedded.path("head"))
"""

from pathlib import Path

from hf_specdec.errors import CheckpointError, unknown_name

NAMES = ("draft", "head", "smollm2-head", "target")


def path(name: str) -> str:
    """Folder of the embedded `"target"`, `"draft"`, `"head"` or `"smollm2-head"`, for `from_pretrained`.

    Raises:
        ConfigError: `name` is none of them.
        CheckpointError: the installed package lacks its weights.
    """
    if not isinstance(name, str) or name not in NAMES:
        raise unknown_name("name", name, NAMES)
    folder = Path(__file__).parent / name
    if not (folder / "model.safetensors").is_file():
        raise CheckpointError(f"The embedded {name} is missing at {folder}. Install hf_specdec again from a wheel.")
    return str(folder)
