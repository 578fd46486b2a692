"""Files that are replaced in one step: a reader sees the old file or the new one, whatever happens meanwhile.

with replacing(path) as beside:
    beside.write_text("all of it")
"""

import contextlib
import os
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path

from hf_specdec.errors import ConfigError

__all__ = ["check_output", "replacing"]

PathLike = str | os.PathLike[str]


@contextlib.contextmanager
def replacing(path: PathLike) -> Iterator[Path]:
    """A new file in the folder of `path` that takes its place when the block ends; after an error nothing changes.

    A symbolic link stays one, its target is replaced; a file that is there hands its mode and, where that is allowed,
    its owner on.

    Raises:
        OSError: the folder is missing, is not writable, or is full; or `path` is no regular file.
    """
    place = Path(os.path.realpath(path))
    if place.exists() and not place.is_file():
        raise OSError(f"{os.fspath(path)!r} is no regular file")
    descriptor, name = tempfile.mkstemp(prefix=f".{place.name}.", dir=place.parent)
    beside = Path(name)
    try:
        os.close(descriptor)
        _take_mode(beside, place)
        yield beside
        with beside.open("rb") as file:
            os.fsync(file.fileno())
        beside.replace(place)
    finally:
        beside.unlink(missing_ok=True)


def check_output(field: str, path: PathLike) -> None:
    """Raise where `replacing` could not work, before the work whose result it is to hold.

    Raises:
        ConfigError: names `field`.
    """
    place = Path(os.path.realpath(path))
    shown = os.fspath(path)
    if not place.parent.is_dir():
        raise ConfigError(field, "must lie in an existing folder", shown, "Make the folder first.")
    if place.exists() and not place.is_file():
        raise ConfigError(field, "must be a regular file, or a name that is free", shown, "Choose another name.")
    if not os.access(place.parent, os.W_OK | os.X_OK) or (place.exists() and not os.access(place, os.W_OK)):
        raise ConfigError(field, "must be a file that can be written", shown, "Choose another folder.")


def _take_mode(new: Path, old: Path) -> None:
    """Give a new file the mode and owner of the old one, or those of any new file."""
    if not old.exists():
        umask = os.umask(0)
        os.umask(umask)
        new.chmod(0o666 & ~umask)
        return
    known = old.stat()
    new.chmod(stat.S_IMODE(known.st_mode))
    with contextlib.suppress(PermissionError):
        os.chown(new, known.st_uid, known.st_gid)
