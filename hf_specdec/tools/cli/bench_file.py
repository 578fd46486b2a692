"""Where `hf-specdec bench` keeps its document while it measures; a write that fails stops no measurement."""

import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from hf_specdec.errors import ConfigError
from hf_specdec.tools.bench.document import write_document
from hf_specdec.tools.bench.journal import Journal, is_journal
from hf_specdec.tools.command_errors import note

SAVE_EVERY_SECONDS = 5.0

Document = dict[str, Any]


class DocumentFile:
    """The file of a run, or none. What cannot be written is tried again at the next `save` and at `close`.

    Attributes:
        document: what has been measured so far; `None` before there is anything.

    Args:
        path: JSON lines where its name ends in `.jsonl`; `None` writes nothing.
        field: the option that names it.
    """

    def __init__(self, path: Path | None, field: str) -> None:
        self.path, self.field = path, field
        self.document: Document | None = None
        self._journal = Journal(path) if path is not None and is_journal(path) else None
        self._saved = time.monotonic()
        self._error: OSError | None = None

    def save(self, document: Document) -> None:
        """Keep what has been measured so far; lines are written at once, the whole document every few seconds."""
        self.document = document
        if self._journal is not None:
            self._try(self._journal.save, document)
        elif time.monotonic() - self._saved > SAVE_EVERY_SECONDS:
            self.close(document)
            self._saved = time.monotonic()

    def close(self, document: Document) -> None:
        """Write all of it."""
        if self._journal is not None:
            self._try(self._journal.close, document)
        elif self.path is not None:
            self._try(partial(write_document, path=self.path), document)

    def check(self) -> None:
        """Raise a ConfigError if the last write failed; to be called after the tables are printed."""
        if self._error is not None:
            remedy = f"{self._error.strerror}. What was measured stands above; --json prints the document."
            raise ConfigError(self.field, "must be a file that can be written", str(self.path), remedy)

    def _try(self, write: Callable[[Document], None], document: Document) -> None:
        try:
            write(document)
        except OSError as error:
            if self._error is None:
                note(f"{self.path} cannot be written: {error.strerror}; what is measured is printed at the end")
            self._error = error
        else:
            self._error = None
