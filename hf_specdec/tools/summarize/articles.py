"""Articles with reference summaries: the set that ships with the package, a `.jsonl` file, or a data set."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from hf_specdec.common.files import json_value, lines_of, lone_surrogate, read_text
from hf_specdec.errors import ConfigError, import_extra

SHIPPED = Path(__file__).parent / "articles.jsonl"
TEXT_FIELDS = ("article", "document", "text")
REFERENCE_FIELDS = ("highlights", "summary", "reference")


@dataclass(frozen=True, slots=True)
class Article:
    """One article.

    Attributes:
        text (`str`): what is to be summarised.
        reference (`str`): the summary of a person.
    """

    text: str
    reference: str


def read_articles(path: Path | None, *, limit: int | None = None) -> list[Article]:
    """The articles of a `.jsonl` or `.jsonl.gz` file; those that ship with the package where `path` is `None`.

    Raises:
        ConfigError: there is no such file, it is no UTF-8 text, or a line of it is no article.
    """
    path = SHIPPED if path is None else path
    if not path.is_file():
        raise ConfigError("--articles", "must be an existing file", str(path), "Check the spelling.")
    lines = lines_of(read_text(path, "--articles"))
    rows = ((f"{path.name}:{number}", json_value(line) or line) for number, line in lines)
    return _articles("--articles", rows, limit)


def load_articles(name: str, *, limit: int | None = None) -> list[Article]:
    """The articles of a data set, through `datasets`.

    Args:
        name (`str`): a name on the hub or a folder, with configuration and split behind colons where they are needed:
            `"abisee/cnn_dailymail:3.0.0:test"`. The split is `"test"` by default.

    Raises:
        ConfigError: the data set has no articles with summaries.
        MissingExtraError: `datasets` is not installed.
    """
    datasets = import_extra("datasets", "datasets", "A data set of articles")
    path, configuration, split = (*name.split(":"), "", "")[:3]
    rows = datasets.load_dataset(path, configuration or None, split=split or "test")
    return _articles("--dataset", ((f"--dataset, row {number}", row) for number, row in enumerate(rows)), limit)


def _articles(option: str, rows: Iterable[tuple[str, Any]], limit: int | None) -> list[Article]:
    """Articles of rows with their places."""
    articles = [_article(place, row) for place, row in islice(rows, limit)]
    if not articles:
        raise ConfigError(option, "must hold at least one article", 0, "A line is an article and its highlights.")
    return articles


def _article(place: str, row: Any) -> Article:
    fields = row if isinstance(row, Mapping) else {}
    found = [
        next((fields[name] for name in names if isinstance(fields.get(name), str)), "").strip()
        for names in (TEXT_FIELDS, REFERENCE_FIELDS)
    ]
    if not all(found):
        rule = f"must have text in one of {', '.join(TEXT_FIELDS)} and in one of {', '.join(REFERENCE_FIELDS)}"
        shown = dict(fields) if fields else str(row)[:80]
        raise ConfigError(place, rule, shown, 'For example {"article": "...", "highlights": "..."}.')
    for text in found:
        if (half := lone_surrogate(text)) is not None:
            rule = f"must be Unicode text, but character {half} is half of a pair"
            raise ConfigError(place, rule, text[half], "Write the character itself.")
    return Article(*found)
