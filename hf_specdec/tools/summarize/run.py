"""Summaries of the same articles by several ways to generate, in turn, and their ROUGE scores."""

import copy
import re
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from hf_specdec.api.many_prompts.prompt_inputs import chat_text
from hf_specdec.common.files import json_value, lines_of, read_text
from hf_specdec.compat.devices import input_device
from hf_specdec.compat.models import max_positions
from hf_specdec.engine.model_state import state_of, using_method_state
from hf_specdec.errors import ConfigError, import_extra

SHIPPED = Path(__file__).parent / "articles.jsonl"
CHAT_TEMPLATE = "Summarize the following article in a few sentences.\n\n{article}"
TEXT_TEMPLATE = "{article}\n\nTL;DR:"
ROUGE = ("rouge1", "rouge2", "rougeL", "rougeLsum")  # words, pairs, longest subsequence, the same by sentence
SENTENCE_END = re.compile(r"(?<=[.!?])\s+")  # rougeLsum goes by lines


class Article(NamedTuple):
    """An article and the summary of a person."""

    text: str
    reference: str


class Summary(NamedTuple):
    """A summary of an article, and the time that it took."""

    token_ids: list[int]
    text: str
    seconds: float


def read_articles(path: Path | None, *, limit: int | None = None) -> list[Article]:
    """Read the articles of a `.jsonl` or `.jsonl.gz` file, by default those that ship with the package."""
    articles = []
    for number, line in lines_of(read_text(path or SHIPPED, "--articles")):
        match json_value(line):
            case {"article": str(text), "highlights": str(reference)} if text.strip() and reference.strip():
                articles.append(Article(text.strip(), reference.strip()))
            case _:
                rule, remedy = "must have an article and its highlights", '{"article": "...", "highlights": "..."}'
                raise ConfigError(f"--articles, line {number}", rule, line[:80], f"Its form is {remedy}.")
    if not articles:
        raise ConfigError("--articles", "must hold at least one article", str(path), "Check the file.")
    return articles[:limit]


@dataclass(frozen=True, slots=True)
class Summarizer:
    """A model that writes summaries.

    Attributes:
        options (`Mapping[str, Any]`): arguments of `generate` for every summary.
        seed (`int`): set before each call.
        max_input_tokens (`int`): of one article; the rest of it is left out.
    """

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    options: Mapping[str, Any] = field(default_factory=dict)
    seed: int = 0
    max_input_tokens: int = 1024

    def prompt(self, article: Article) -> str:
        """Return the text that the model continues."""
        is_chat = self.tokenizer.chat_template is not None
        ids = self.tokenizer(article.text, add_special_tokens=False, verbose=False)["input_ids"]
        text = article.text
        if len(ids) > self.max_input_tokens:  # a character cut in two is decoded to U+FFFD
            text = str(self.tokenizer.decode(ids[: self.max_input_tokens])).rstrip("\N{REPLACEMENT CHARACTER}")
        content = (CHAT_TEMPLATE if is_chat else TEXT_TEMPLATE).format(article=text)
        return chat_text(self.tokenizer, [{"role": "user", "content": content}]) if is_chat else content

    def write(self, article: Article, method: Mapping[str, Any]) -> Summary:
        """Summarise an article by the arguments of `generate` that choose a method."""
        is_text = self.tokenizer.chat_template is None
        encoded = self.tokenizer(self.prompt(article), add_special_tokens=is_text, return_tensors="pt")
        inputs = {name: encoded[name].to(input_device(self.model)) for name in ("input_ids", "attention_mask")}
        length, new = inputs["input_ids"].shape[1], self.options["max_new_tokens"]
        positions = max_positions(self.model.config)
        if positions is not None and length + new > positions:
            rule = f"must leave room for {new} new tokens within the model's {positions} positions"
            raise ConfigError("max_input_tokens", rule, self.max_input_tokens, "Take fewer.")
        torch.manual_seed(self.seed)
        started = time.perf_counter()
        output: torch.Tensor = self.model.generate(**inputs, **self.options, **method)
        token_ids = output[0, length:].tolist()
        seconds = time.perf_counter() - started
        return Summary(token_ids, self.tokenizer.decode(token_ids, skip_special_tokens=True).strip(), seconds)


def summarize_all(
    summarizer: Summarizer, articles: Sequence[Article], ways: Mapping[str, Mapping[str, Any]]
) -> dict[str, list[Summary]]:
    """Summarise articles by every way in turn, each first equally often, after a warm-up that is forgotten."""
    with using_method_state(summarizer.model, copy.deepcopy(state_of(summarizer.model).method_state)):
        for method in ways.values():
            summarizer.write(articles[0], method)
    written: dict[str, list[Summary]] = {name: [] for name in ways}
    names = deque(ways)
    for article in articles:
        for name in names:
            written[name].append(summarizer.write(article, ways[name]))
        names.rotate(-1)
    return written


def check_rouge() -> None:
    """Raise MissingExtraError where `rouge-score` is not installed."""
    import_extra("rouge_score", "bench", "ROUGE")


def score_rows(written: Mapping[str, Sequence[Summary]], articles: Sequence[Article]) -> list[dict[str, Any]]:
    """Return a row of JSON values for each way, plain generation first: ROUGE, tokens a second, equality, texts."""
    plain, *_ = written.values()
    references = [article.reference for article in articles]
    return [
        {
            "name": name,
            **score([summary.text for summary in summaries], references),
            "num_tokens": (num_tokens := sum(len(summary.token_ids) for summary in summaries)),
            "tokens_per_second": num_tokens / sum(summary.seconds for summary in summaries),
            "num_equal_to_plain": sum(a.token_ids == b.token_ids for a, b in zip(plain, summaries, strict=True)),
            "summaries": [summary.text for summary in summaries],
        }
        for name, summaries in written.items()
    ]


def score(summaries: Sequence[str], references: Sequence[str]) -> dict[str, float]:
    """Return the mean F-measures of summaries, from 0 to 100, for each kind of ROUGE."""
    from rouge_score.rouge_scorer import RougeScorer

    scorer = RougeScorer(list(ROUGE))
    texts = ([SENTENCE_END.sub("\n", text.strip()) for text in column] for column in (references, summaries))
    scores = [scorer.score(reference, summary) for reference, summary in zip(*texts, strict=True)]
    return {kind: 100 * fmean(score[kind].fmeasure for score in scores) for kind in ROUGE}
