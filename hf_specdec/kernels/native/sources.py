"""Checksum of the core's C sources: tells a library that was built from other sources.

Of the standard library alone: the build runs this file.
"""

from pathlib import Path
from zlib import crc32


def sources_number(folder: Path) -> int | None:
    """Checksum of the C files in the folder; `None` where there are none, as in an installed wheel."""
    files = sorted([*folder.glob("*.c"), *folder.glob("*.h")])
    return crc32(b"".join(file.read_bytes() for file in files)) & 0x7FFFFFFF if files else None
