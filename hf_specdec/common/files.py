"""Files of users: text is read whole or refused by name, and what is written takes its place in one step."""

import contextlib
import errno
import gzip
import json
import os
import shutil
import sys
import tempfile
import uuid
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from hf_specdec.errors import ConfigError

if sys.platform != "win32":
    import fcntl


TRIED_BYTES = 1 << 16
SHOWN_OF_NAME = 32  # characters of a file's name in that of the new file next to it

PathLike = str | os.PathLike[str]


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
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        remedy = f"Byte {error.start}, in line {line}, is none of UTF-8; iconv converts other encodings."
        raise ConfigError(field, "must be UTF-8 text", shown, remedy) from error


def check_path(field: str, path: object, what: str) -> None:
    """Raise unless a value can be a path or a name on the hub.

    Args:
        what: what it should be.

    Raises:
        ConfigError: names `field`.
    """
    text = os.fspath(path) if isinstance(path, str | os.PathLike) else None
    if not isinstance(text, str) or not text or "\0" in text:
        raise ConfigError(field, f"must be {what}", path, "Give a path as text or a pathlib.Path.")
    if reason := _too_long(text):
        raise ConfigError(field, f"must be {what}", path, f"{reason}. Give a shorter path.")


def _too_long(path: PathLike) -> str | None:
    """System error of a path that is too long; `None` for any other path."""
    try:
        os.lstat(path)
    except OSError as error:
        return error.strerror if error.errno == errno.ENAMETOOLONG else None
    return None


def is_missing_folder(path: PathLike) -> bool:
    """Returns whether a path is not there and cannot be a name on the hub."""
    folder, text = Path(path), os.fspath(path)
    return not folder.exists() and (folder.is_absolute() or text.startswith((".", "~")) or text.count("/") > 1)


def said_of_hub(path: PathLike, reason: str) -> str:
    """Error text for a checkpoint that was looked up on the hub, as there is no folder of its name."""
    rule = "`path` must be an existing folder or a name on the hub"
    return f"{rule}, but there is no folder {os.fspath(path)!r} here, and nothing was loaded from the hub: {reason}"


def lines_of(text: str) -> Iterator[tuple[int, str]]:
    """The lines that are not blank, with their numbers from 1; only a line feed ends one."""
    for number, line in enumerate(text.split("\n"), 1):
        if line.strip():
            yield number, line


def json_value(text: str) -> Any:
    """The value of a JSON text; `None` where it is none, or is nested too deeply."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def lone_surrogate(text: str) -> int | None:
    """Index of half a surrogate pair in a text, which is no character and has no tokens; `None` if there is none."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        return error.start
    return None


@contextlib.contextmanager
def replacing(path: PathLike) -> Iterator[Path]:
    """A new file in the folder of `path` that takes its place when the block ends; after an error nothing changes.

    A symbolic link stays one, its target is replaced; a file that is there hands its mode on.

    Raises:
        OSError: the folder is missing, is not writable, or is full; or `path` is no regular file.
    """
    place = Path(os.path.realpath(path))
    if place.exists() and not place.is_file():
        raise OSError(f"{os.fspath(path)!r} is no regular file")
    # The whole name and what is added to it may be longer than a name may be.
    temporary = place.with_name(f".{place.name[:SHOWN_OF_NAME]}.{uuid.uuid4().hex}")
    try:
        temporary.touch(exist_ok=False)
        if place.exists():
            shutil.copymode(place, temporary)
        yield temporary
        with temporary.open("rb") as file:
            os.fsync(file.fileno())
        temporary.replace(place)
    finally:
        temporary.unlink(missing_ok=True)


def lock(descriptor: int) -> None:
    """Lock an open file until it is closed, once no one else holds it; without locks in the file system, do nothing."""
    if sys.platform != "win32":
        with contextlib.suppress(OSError):
            fcntl.flock(descriptor, fcntl.LOCK_EX)


def check_output(field: str, path: PathLike) -> None:
    """Raise where `replacing` could not work, before the work whose result it is to hold; nothing is left behind.

    Raises:
        ConfigError: names `field`.
    """
    place, shown = Path(os.path.realpath(path)), os.fspath(path)
    if not place.parent.is_dir():
        raise ConfigError(field, "must lie in an existing folder", shown, "Make the folder first.")
    try:
        if place.exists() and not place.is_file():
            raise ConfigError(field, "must be a regular file, or a name that is free", shown, "Choose another name.")
        with tempfile.TemporaryFile(dir=place.parent) as file:
            file.write(bytes(TRIED_BYTES))
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        remedy = f"{error.strerror}. Choose another name or folder."
        raise ConfigError(field, "must be a file that can be written", shown, remedy) from error
