"""The file of `hf-specdec bench`, written while it measures; a write that fails stops no measurement."""

import time
from pathlib import Path

from hf_specdec.errors import ConfigError
from hf_specdec.tools.bench.document import Document, write_document
from hf_specdec.tools.command_errors import note

SAVE_EVERY_SECONDS = 5.0


class DocumentFile:
    """The file of a run, or none. Errors are told, and a write is tried again at the next `save` and at `close`.

    Attributes:
        document: measured so far; `None` before there is anything.

    Args:
        path: of the file; `None` writes nothing.
        field: the option that names it.
    """

    def __init__(self, path: Path | None, field: str) -> None:
        self.path, self.field = path, field
        self.document: Document | None = None
        self._saved = time.monotonic()
        self._error: OSError | None = None

    def save(self, document: Document) -> None:
        """Keep what has been measured so far; the file is written every few seconds."""
        self.document = document
        if time.monotonic() - self._saved > SAVE_EVERY_SECONDS:
            self.close(document)
            self._saved = time.monotonic()

    def close(self, document: Document) -> None:
        """Write the document."""
        if self.path is None:
            return
        try:
            write_document(document, self.path)
            self._error = None
        except OSError as error:
            if self._error is None:
                note(f"{self.path} cannot be written: {error.strerror}; what is measured is printed at the end")
            self._error = error

    def check(self) -> None:
        """Raise a ConfigError if the last write failed; to be called after the tables are printed."""
        if self._error is not None:
            remedy = f"{self._error.strerror}. The tables above hold what was measured; --json prints the document."
            raise ConfigError(self.field, "must be a file that can be written", str(self.path), remedy)
