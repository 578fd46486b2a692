"""Articles come from the package, from a file or from a data set; a line that is none is named."""

import gzip
import json
import sys
from pathlib import Path

import pytest

from hf_specdec.errors import ConfigError, MissingExtraError
from hf_specdec.tools.summarize.articles import Article, load_articles, read_articles

ROWS = [{"article": f"Text {number}.", "highlights": f"Short {number}."} for number in range(3)]


def test_the_shipped_articles_are_longer_than_their_summaries() -> None:
    articles = read_articles(None)
    assert len(articles) == 12
    assert len({article.text for article in articles}) == 12
    for article in articles:
        assert 20 < len(article.reference.split()) < len(article.text.split()) / 2


@pytest.mark.parametrize("packed", [False, True])
def test_a_file_is_read_up_to_the_limit(tmp_path: Path, packed: bool) -> None:
    content = "".join(json.dumps(row) + "\n" for row in ROWS).encode()
    path = tmp_path / ("articles.jsonl.gz" if packed else "articles.jsonl")
    path.write_bytes(gzip.compress(content) if packed else content)
    assert read_articles(path, limit=2) == [Article("Text 0.", "Short 0."), Article("Text 1.", "Short 1.")]
    assert len(read_articles(path)) == 3


SAID = {"role": "user", "content": "Shorten it."}
SYSTEM = {"role": "system", "content": "Be brief."}


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        (
            {"messages": [SYSTEM, SAID, {"role": "assistant", "content": "Short."}]},
            Article("Shorten it.", "Short.", (SYSTEM,), is_chat=True),
        ),
        (
            {"instruction": "Shorten it.", "input": "Long.", "output": "Short."},
            Article("Shorten it.\n\nLong.", "Short.", is_chat=True),
        ),
        ({"turns": ["Shorten it."], "reference": "Short."}, Article("Shorten it.", "Short.", is_chat=True)),
    ],
)
def test_a_chat_with_its_answer_is_read(tmp_path: Path, row: dict[str, object], expected: Article) -> None:
    path = tmp_path / "chats.jsonl"
    path.write_text(json.dumps(row) + "\n")
    assert read_articles(path) == [expected]


@pytest.mark.parametrize(
    "line",
    [
        '{"turns": ["No answer."]}',
        '{"turns": ["One.", "Two."], "answer": "Three."}',
        '{"article": "Only a text."}',
        '{"highlights": "Only a summary."}',
        '["a", "b"]',
        "no JSON",
        '{"article": 3}',
        "",
    ],
)
def test_a_line_that_is_no_article_is_refused(tmp_path: Path, line: str) -> None:
    """By file and line; a file without lines by its option."""
    path = tmp_path / "articles.jsonl"
    path.write_text(f"{json.dumps(ROWS[0])}\n\n{line}\n" if line else "\n")
    with pytest.raises(
        ConfigError, match="`articles.jsonl:3` must have text in one of" if line else "`--articles` must hold"
    ):
        read_articles(path)


@pytest.mark.parametrize("field", ["article", "highlights"])
def test_half_a_surrogate_pair_is_refused(tmp_path: Path, field: str) -> None:
    path = tmp_path / "articles.jsonl"
    path.write_text(json.dumps(ROWS[0] | {field: "a\ud800b"}) + "\n")
    with pytest.raises(ConfigError, match="`articles.jsonl:1` must be Unicode text, but character 1 is half of a pair"):
        read_articles(path)


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="nowhere.jsonl"):
        read_articles(tmp_path / "nowhere.jsonl")


def test_a_data_set_without_its_package_gives_the_install_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(MissingExtraError, match=r"hf_specdec\[datasets\]"):
        load_articles("abisee/cnn_dailymail:3.0.0:test")


@pytest.mark.extras
def test_a_data_set_is_loaded_from_a_folder(tmp_path: Path) -> None:
    pytest.importorskip("datasets")
    (tmp_path / "test.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    assert load_articles(str(tmp_path), limit=1) == [Article("Text 0.", "Short 0.")]
