"""`--spec-memory FILE`: what `auto` remembers, from one run of a command to the next.

with remembering(model, Path("memory.safetensors")):
    model.generate(**inputs, spec_method="auto")
"""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from transformers import PreTrainedModel

import hf_specdec
from hf_specdec.cli.processes import processes
from hf_specdec.errors import ConfigError

__all__ = ["remembering"]


@contextmanager
def remembering(model: PreTrainedModel, file: Path | None) -> Iterator[None]:
    """Give `model` the memory in `file`, if it is there, and save it at the end, however that comes about.

    Raises:
        ConfigError: the file is none of a memory, or its folder is missing.
    """
    if file is None:
        yield
        return
    if not file.absolute().parent.is_dir():
        raise ConfigError("--spec-memory", "must lie in an existing folder", str(file), "Make the folder first.")
    if file.exists():
        hf_specdec.enable(model, spec_memory=hf_specdec.SpecMemory.load(file))
    try:
        yield
    finally:
        if processes().is_main_process:
            hf_specdec.spec_memory(model).save(file)
