"""A file of records: a line of JSON with the header, then a line for each call. A run goes on where its file ends.

Fields of a record: `row`, `prompt`, `task`, `round` (0 is the round that is watched, and not timed), and those of
`measured_call`, or `error`. Knows nothing about models.
"""

import json
from pathlib import Path
from typing import Any, Self, TextIO

from hf_specdec.common.files import check_output, check_path
from hf_specdec.errors import ConfigError

RULE = "must be a file of records of hf-specdec bench"
SAME = ("model", "dtype", "device", "threads", "settings")  # fields of the header that every line of a file has

Record = dict[str, Any]
Header = dict[str, Any]


def read_records(path: str | Path, field: str = "path") -> tuple[Header, list[Record]]:
    """Read a file of records; a last line that was cut off is left out.

    Args:
        field: name of the path, for errors.

    Raises:
        ConfigError: there is no such file, or it holds something else.
    """
    check_path(field, path, RULE.removeprefix("must be "))
    try:
        lines = Path(path).read_text("utf-8").splitlines(keepends=True)
        header = json.loads(lines[0])["header"]
        records = [json.loads(line) for line in lines[1:] if line.endswith("\n")]
        if not isinstance(header, dict) or not all(_key(record) for record in records):
            raise TypeError("a line is no record")
    except FileNotFoundError as error:
        raise ConfigError(field, RULE, str(path), "There is no such file. Check the spelling.") from error
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise ConfigError(field, RULE, str(path), f"Check the file: {error}.") from error
    return header, records


class Records:
    """Records of a run, each written as it is added.

    Attributes:
        records (`list[Record]`): of the file, and those that were added.
        path (`Path`, *optional*): the file.

    Args:
        header: of this run.
        path: of the file; `None` keeps the records in memory.

    Raises:
        ConfigError: `path` cannot be written, or holds something else or another measurement.
    """

    def __init__(self, header: Header, path: Path | None = None) -> None:
        self.header, self.records = header, list[Record]()
        self._file: TextIO | None = None
        self.path = path
        if path is None:
            return
        check_output("output", path)
        if path.exists() and path.stat().st_size:
            self.header, self.records = read_records(path, "output")
            for name in SAME:
                if self.header.get(name) != (now := json.loads(json.dumps(header[name]))):
                    remedy = f"This run has {now!r}. Repeat the options, or choose another file."
                    raise ConfigError("output", f"must have the {name} of this run", self.header.get(name), remedy)
        self._keys = {_key(record) for record in self.records}

    def __enter__(self) -> Self:
        self._keys = {_key(record) for record in self.records}
        if self.path is not None:
            lines = [{"header": self.header}, *self.records]  # without a line that was cut off
            self.path.write_text("".join(f"{json.dumps(line)}\n" for line in lines), "utf-8")
            self._file = self.path.open("a", encoding="utf-8")
        return self

    def __exit__(self, *error: object) -> None:
        if self._file is not None:
            self._file.close()

    def has(self, row: str, prompt: str, number: int) -> bool:
        """Returns whether a row was measured on a prompt in a round."""
        return (row, prompt, number) in self._keys

    def add(self, record: Record) -> None:
        """Add a record, and write it."""
        self.records.append(record)
        self._keys.add(_key(record))
        if self._file is not None:
            self._file.write(json.dumps(record) + "\n")
            self._file.flush()


def _key(record: Record) -> tuple[str, str, int]:
    return record["row"], record["prompt"], record["round"]
