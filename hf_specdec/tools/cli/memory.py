"""`--spec-memory FILE`: what `auto` remembers, from one run of a command to the next."""

import contextlib
import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

from transformers import PreTrainedModel

import hf_specdec
from hf_specdec.common.files import check_output, lock
from hf_specdec.compat import text_config
from hf_specdec.errors import ConfigError
from hf_specdec.tools.cli.where import processes

FIELD = "--spec-memory"


class MemoryOnDisk:
    """A file of a memory that several commands may use at once.

    Raises:
        ConfigError: the file is none of a memory, or cannot be written.
    """

    def __init__(self, path: Path) -> None:
        check_output(FIELD, path)
        self.path = Path(os.path.realpath(path))
        self.memory = hf_specdec.SpecMemory.load(self.path) if self.path.exists() else None
        self._seen = self._state()

    def save(self, memory: hf_specdec.SpecMemory) -> None:
        """Put `memory` in the file; what another command has put there meanwhile is kept next to it."""
        folder = os.open(self.path.parent, os.O_RDONLY)
        try:
            lock(folder, waits=True)  # the folder's, since the file itself is replaced
            if self._state() not in (None, self._seen):
                memory.merge(hf_specdec.SpecMemory.load(self.path))
            memory.save(self.path)
            self._seen = self._state()
        finally:
            os.close(folder)

    def _state(self) -> Any:
        """Changes whenever the file is replaced; `None` where there is none."""
        try:
            found = self.path.stat()
        except FileNotFoundError:
            return None
        return found.st_ino, found.st_mtime_ns, found.st_size


def open_memory(path: Path | None) -> MemoryOnDisk | None:
    """File that `--spec-memory` names, checked before a model is loaded; `None` without the option."""
    return None if path is None else MemoryOnDisk(path)


def _check_vocabulary(kept: MemoryOnDisk, model: PreTrainedModel) -> None:
    """Raise where a memory holds tokens that the model does not have: it is of another tokenizer.

    Raises:
        ConfigError: it does.
    """
    assert kept.memory is not None
    vocab_size = text_config(model.config).vocab_size
    tokens = [*kept.memory.pool.generations(), kept.memory.recycled.export()["tokens"].ravel().tolist()]
    largest = max((max(part) for part in tokens if part), default=0)
    if largest >= vocab_size:
        rule = f"must hold tokens of this model ({vocab_size} of them), but there is one with the number {largest}"
        remedy = "Name the file of a model with this tokenizer, or one that is not there yet."
        raise ConfigError(FIELD, rule, str(kept.path), remedy)


@contextlib.contextmanager
def remembering(model: PreTrainedModel, kept: MemoryOnDisk | None) -> Iterator[None]:
    """Give `model` the memory in the file, and save it at the end, however that comes about, SIGTERM included."""
    if kept is None:
        yield
        return
    if kept.memory is not None:
        _check_vocabulary(kept, model)
        hf_specdec.enable(model, spec_memory=kept.memory)
    with _terminable():
        try:
            yield
        finally:
            if processes().is_main_process:
                kept.save(hf_specdec.spec_memory(model))


@contextlib.contextmanager
def _terminable() -> Iterator[None]:
    """Let SIGTERM end the block as an exception does; signals are the main thread's."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def leave(number: int, frame: FrameType | None) -> NoReturn:
        signal.signal(number, signal.SIG_IGN)  # once is enough
        raise SystemExit(128 + number)

    before = signal.signal(signal.SIGTERM, leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
