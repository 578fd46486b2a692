"""A table of text, made of rows of values."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Self


@dataclass(frozen=True, slots=True)
class Table:
    """Headings and rows of text; the first column names the row."""

    title: str
    headings: list[str]
    rows: list[list[str]]

    @classmethod
    def of(cls, title: str, columns: Mapping[str, str], rows: Iterable[Mapping[str, Any]]) -> Self:
        """Fill in the columns' formats for each row; a value that is missing or `None` is "-".

        Args:
            columns: by their headings formats such as `"{seconds:.1f} s"` of a row's fields.
        """
        return cls(title, list(columns), [[_cell(text, row) for text in columns.values()] for row in rows])

    def transposed(self) -> "Table":
        """Make a table of its columns as rows."""
        heading, *rows = map(list, zip(self.headings, *self.rows, strict=True))
        return Table(self.title, heading, rows)

    def markdown(self) -> str:
        """The table in markdown, its first column left-aligned and the others right-aligned."""
        lines = [self.headings, ["---", *["---:"] * (len(self.headings) - 1)], *self.rows]
        return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines)


def _cell(text: str, row: Mapping[str, Any]) -> str:
    try:
        return text.format_map(row)
    except (LookupError, TypeError):
        return "-"
