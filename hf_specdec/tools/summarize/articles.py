"""Articles with reference summaries: the set that ships with the package, a `.jsonl` file, or a data set.

A chat with its answer takes the place of an article: a request in the forms of `tools/prompt_lines.py`, and what it is
compared with, the assistant's last message or a field such as `output`.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from hf_specdec.common.files import json_value, lines_of, lone_surrogate, read_text
from hf_specdec.errors import ConfigError, import_extra
from hf_specdec.tools.prompt_lines import Message, NotAPromptError, PromptLine, read_value

SHIPPED = Path(__file__).parent / "articles.jsonl"
TEXT_FIELDS = ("article", "document", "text")
REFERENCE_FIELDS = ("highlights", "summary", "reference")
ANSWER_FIELDS = (*REFERENCE_FIELDS, "output", "response", "answer")


@dataclass(frozen=True, slots=True)
class Article:
    """One article.

    Attributes:
        text (`str`): what is to be summarised; of a chat, the message that is answered.
        reference (`str`): the summary of a person, or the answer.
        before (`tuple[Message, ...]`): messages of a chat before that.
        is_chat (`bool`): whether `text` says itself what is wanted.
    """

    text: str
    reference: str
    before: tuple[Message, ...] = ()
    is_chat: bool = False


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
    asked = None if any(name in fields for name in TEXT_FIELDS) else _request(row)
    text = _text_of(fields, TEXT_FIELDS) if asked is None else asked.turns[0].strip()
    reference = _text_of(fields, REFERENCE_FIELDS) if asked is None else _answer(fields)
    if not (text and reference):
        rule = (
            f"must have text in one of {', '.join(TEXT_FIELDS)} and in one of {', '.join(REFERENCE_FIELDS)}, "
            "or be a chat of one request with its answer"
        )
        shown = dict(fields) if fields else str(row)[:80]
        raise ConfigError(place, rule, shown, 'For example {"article": "...", "highlights": "..."}.')
    for said in (text, reference):
        if (half := lone_surrogate(said)) is not None:
            rule = f"must be Unicode text, but character {half} is half of a pair"
            raise ConfigError(place, rule, said[half], "Write the character itself.")
    return Article(text, reference) if asked is None else Article(text, reference, asked.before, is_chat=True)


def _request(row: Any) -> PromptLine | None:
    """The chat of a row that ends with one request; `None` for another row."""
    try:
        read = read_value(row)
    except NotAPromptError:
        return None
    return read if read.is_chat and len(read.turns) == 1 else None


def _answer(fields: Mapping[str, Any]) -> str:
    """The answer to a chat's request, empty where there is none."""
    match fields.get("messages"):
        case [*_, {"role": "assistant", "content": str(said)}]:
            return said.strip()
    return _text_of(fields, ANSWER_FIELDS)


def _text_of(fields: Mapping[str, Any], names: Iterable[str]) -> str:
    """The text of the first of these fields that has one, else an empty one."""
    return next((fields[name] for name in names if isinstance(fields.get(name), str)), "").strip()
