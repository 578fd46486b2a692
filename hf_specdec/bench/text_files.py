"""Text files of users: UTF-8, packed with gzip or not, with or without a byte order mark; anything else is an error."""

import gzip
import zlib
from collections.abc import Iterator
from pathlib import Path

from hf_specdec.errors import ConfigError

__all__ = ["lines_of", "lone_surrogate", "read_text"]

UTF16_MARKS = (b"\xff\xfe", b"\xfe\xff")


def read_text(path: Path, field: str) -> str:
    """The text of a file, without its byte order mark.

    Raises:
        ConfigError: names `field`: the file cannot be read, is damaged, or is no UTF-8.
    """
    shown = str(path)
    try:
        raw = path.read_bytes()
        content = gzip.decompress(raw) if path.suffix == ".gz" else raw
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise ConfigError(field, "must be a whole gzip file", shown, f"Pack it again: {error}.") from error
    except OSError as error:
        raise ConfigError(field, "must be a file that can be read", shown, f"{error.strerror}.") from error
    if content.startswith(UTF16_MARKS):
        remedy = "It looks like UTF-16: iconv -f UTF-16 -t UTF-8 converts it."
        raise ConfigError(field, "must be UTF-8 text", shown, remedy)
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        remedy = f"Byte {error.start} is none of UTF-8; iconv -f LATIN1 -t UTF-8 converts Latin-1."
        raise ConfigError(field, "must be UTF-8 text", shown, remedy) from error
    if "\0" in text:
        raise ConfigError(field, "must be UTF-8 text", shown, "It holds zero bytes, as binary files and UTF-16 do.")
    return text


def lines_of(text: str) -> Iterator[tuple[int, str]]:
    """The lines that are not blank, with their numbers from 1; only a line feed ends one."""
    for number, line in enumerate(text.split("\n"), 1):
        if line.strip():
            yield number, line


def lone_surrogate(text: str) -> int | None:
    """Where a text holds half of a surrogate pair, which is no character and has no tokens; `None` if nowhere."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        return error.start
    return None
