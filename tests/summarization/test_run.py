"""Articles are read from a file, every way gets the same prompts, and ROUGE is as published."""

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

import hf_specdec
from hf_specdec.errors import ConfigError
from hf_specdec.tools.summarize.run import Article, Summarizer, read_articles, score, score_rows, summarize_all

OPTIONS: dict[str, Any] = {"max_new_tokens": 12, "do_sample": False}
WAYS: dict[str, dict[str, Any]] = {"plain": {"spec_method": None}, "lookup": {"spec_method": "prompt_lookup"}}
ROWS = [{"article": f"Text {number}.", "highlights": f"Short {number}."} for number in range(3)]
ARTICLES = [Article(" ".join(article.text.split()[:30]), article.reference) for article in read_articles(None, limit=3)]
CHAT = "{% for m in messages %}[{{ m['role'] }}] {{ m['content'] }}{% endfor %}[assistant]"


@pytest.fixture(scope="module")
def target() -> Any:
    return hf_specdec.AutoModelForCausalLM.from_pretrained(hf_specdec.embedded.path("target"), precision="fp32")


def test_the_shipped_articles_are_longer_than_their_summaries() -> None:
    articles = read_articles(None)
    assert len({article.text for article in articles}) == 12
    for article in articles:
        assert 20 < len(article.reference.split()) < len(article.text.split()) / 2


def test_a_file_is_read_up_to_the_limit_and_a_line_that_is_no_article_named(tmp_path: Path) -> None:
    path = tmp_path / "articles.jsonl.gz"
    path.write_bytes(gzip.compress("".join(json.dumps(row) + "\n" for row in ROWS).encode()))
    assert read_articles(path, limit=2) == [Article("Text 0.", "Short 0."), Article("Text 1.", "Short 1.")]
    path = tmp_path / "articles.jsonl"
    for line in ('{"article": "Only a text."}', '["a", "b"]', "no JSON", '{"article": 3, "highlights": "Four."}'):
        path.write_text(f"{json.dumps(ROWS[0])}\n\n{line}\n")
        with pytest.raises(ConfigError, match="`--articles, line 3` must have an article and its highlights"):
            read_articles(path)
    path.write_text("\n")
    with pytest.raises(ConfigError, match="must hold at least one article"):
        read_articles(path)


def test_all_ways_write_the_same_in_turn(target: Any, tokenizer: Any) -> None:
    written = summarize_all(Summarizer(target, tokenizer, OPTIONS), ARTICLES, WAYS)
    plain, lookup = score_rows(written, ARTICLES)
    assert lookup["num_equal_to_plain"] == 3 and lookup["summaries"] == plain["summaries"]
    assert plain["num_tokens"] == 36 == sum(len(summary.token_ids) for summary in written["plain"])


@pytest.mark.wide
def test_a_seed_makes_samples_the_same(target: Any, tokenizer: Any) -> None:
    options = {**OPTIONS, "do_sample": True, "top_k": 0}
    written = summarize_all(Summarizer(target, tokenizer, options, seed=3), ARTICLES, WAYS)
    assert [one.token_ids for one in written["lookup"]] == [one.token_ids for one in written["plain"]]


def test_the_warm_up_leaves_no_memory(target: Any, tokenizer: Any) -> None:
    """Else a method with a memory would draft the first article from its own answers."""
    steps: list[Any] = []
    way = {"spec_method": "auto", "auto_config": {"num_nodes": 8}, "spec_observer": steps.append}
    summarize_all(Summarizer(target, tokenizer, OPTIONS), ARTICLES[:1], {"auto": way})
    half = len(steps) // 2
    assert half > 0 and len(steps) == 2 * half
    assert [step.accepted for step in steps[:half]] == [step.accepted for step in steps[half:]]


def test_the_article_alone_is_cut(target: Any, tokenizer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not within a character, and an article for which the model has no positions is refused."""
    japanese = Article("\u65e5\u672c\u8a9e\u306e\u8a18\u4e8b\U0001f389\u3067\u3059\u3002" * 30, "")
    for article, most in [(ARTICLES[0], 10), (japanese, 5), (japanese, 50)]:
        prompt = Summarizer(target, tokenizer, max_input_tokens=most).prompt(article)
        cut = prompt.removesuffix("\n\nTL;DR:")
        assert prompt != cut and article.text.startswith(cut) and 0 < len(cut) < len(article.text)
    monkeypatch.setattr(target.config, "max_position_embeddings", 40)
    with pytest.raises(ConfigError, match="must leave room for 12 new tokens within the model's 40 positions"):
        Summarizer(target, tokenizer, OPTIONS).write(ARTICLES[0], {})


def test_the_prompt_follows_the_template(target: Any, tokenizer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    assert Summarizer(target, tokenizer).prompt(Article("{Text}.", "T.")) == "{Text}.\n\nTL;DR:"
    monkeypatch.setattr(tokenizer, "chat_template", CHAT)
    prompt = Summarizer(target, tokenizer).prompt(Article("Text.", "T."))
    assert prompt == "[user] Summarize the following article in a few sentences.\n\nText.[assistant]"


def test_rouge_is_that_of_the_definition() -> None:
    """Three of four words, no pair, a subsequence of two; the mean of several; sentence by sentence in any order."""
    found = score(["the cat down sat"], ["the dog sat down"])
    assert (found["rouge1"], found["rouge2"], found["rougeL"]) == (pytest.approx(75), 0, pytest.approx(50))
    assert score(["a b", "x y"], ["a b", "a b"])["rouge1"] == pytest.approx(50)
    found = score(["It rained. The bridge fell."], ["The bridge fell. It rained."])
    assert found["rougeL"] < 70 and found["rougeLsum"] == pytest.approx(100)
