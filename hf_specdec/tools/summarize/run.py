"""Summaries of the same articles by several ways to generate, in turn. Knows nothing about ROUGE or printing."""

import copy
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from hf_specdec.api.many_prompts.prompt_inputs import chat_text
from hf_specdec.common.files import lone_surrogate
from hf_specdec.common.transfer import left_padded
from hf_specdec.compat import input_device, max_positions
from hf_specdec.engine.model_state import state_of, using_method_state
from hf_specdec.errors import ConfigError
from hf_specdec.tools.summarize.articles import Article

CHAT_TEMPLATE = "Summarize the following article in a few sentences.\n\n{article}"
TEXT_TEMPLATE = "{article}\n\nTL;DR:"
REPLACEMENT = "\N{REPLACEMENT CHARACTER}"  # what tokens that end within a character are decoded to


@dataclass(slots=True)
class Summaries:
    """Summaries by one way to generate, article by article.

    Attributes:
        token_ids (`list[list[int]]`): the new tokens, up to the end-of-text token and with it.
        seconds (`float`): wall-clock time of all calls of `generate`.
    """

    token_ids: list[list[int]] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)
    seconds: float = 0.0

    @property
    def num_tokens(self) -> int:
        """New tokens of all summaries."""
        return sum(map(len, self.token_ids))

    @property
    def tokens_per_second(self) -> float:
        """Over all calls."""
        return self.num_tokens / self.seconds

    def num_equal(self, other: "Summaries") -> int:
        """Articles whose summary has the same tokens in both."""
        return sum(mine == theirs for mine, theirs in zip(self.token_ids, other.token_ids, strict=True))


@dataclass(frozen=True, slots=True)
class Summarizer:
    """A model that writes summaries.

    Attributes:
        options (`Mapping[str, Any]`): keyword arguments of `generate` that all ways share.
        seed (`int | None`): set before each call; `None` leaves the random state as it is.
        batch_size (`int`): articles in one call.
        max_input_tokens (`int`): of one article; the rest of it is left out, as is what the model has no positions for.
        template (`str | None`): the prompt of an article, with `{article}` in it. `None` asks in a chat where the
            tokenizer has a chat template, else puts "TL;DR:" behind the article. Chats are taken as they are.
    """

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    options: Mapping[str, Any] = field(default_factory=dict)
    seed: int | None = None
    batch_size: int = 1
    max_input_tokens: int = 1024
    template: str | None = None

    def __post_init__(self) -> None:
        if self.template is not None and "{article}" not in self.template:
            raise ConfigError("--prompt-template", "must contain {article}", self.template, "Say where the text goes.")
        if self.template is not None and lone_surrogate(self.template) is not None:
            raise ConfigError("--prompt-template", "must be Unicode text", self.template, "Is it UTF-8?")

    def prompt(self, article: Article) -> str:
        """The text that the model continues."""
        return self._asked(article, self._shortened(article))

    def write(self, articles: Sequence[Article], into: Summaries, how: Mapping[str, Any]) -> None:
        """Summarise one batch of articles; `how` holds the arguments of `generate` that choose the way."""
        inputs = self._encode([self.prompt(article) for article in articles])
        if self.seed is not None:
            torch.manual_seed(self.seed)
        started = time.perf_counter()
        output: torch.Tensor = self.model.generate(**inputs, **self.options, **how)
        new_tokens = output[:, inputs["input_ids"].shape[1] :].tolist()
        into.seconds += time.perf_counter() - started
        for token_ids in map(self._without_padding, new_tokens):
            into.token_ids.append(token_ids)
            into.texts.append(self.tokenizer.decode(token_ids, skip_special_tokens=True).strip())

    def _asked(self, article: Article, text: str) -> str:
        """The request of an article of which `text` is taken."""
        is_chat_model = getattr(self.tokenizer, "chat_template", None) is not None
        asked = text
        if not article.is_chat:
            asked = (self.template or (CHAT_TEMPLATE if is_chat_model else TEXT_TEMPLATE)).replace("{article}", text)
        if is_chat_model:
            return chat_text(self.tokenizer, [*article.before, {"role": "user", "content": asked}])
        return "\n\n".join([*(message["content"] for message in article.before), asked])

    def _shortened(self, article: Article) -> str:
        """As much of an article as was asked for, and as the model has positions for next to request and summary.

        Raises:
            ConfigError: it has none.
        """
        positions, new = max_positions(self.model.config), int(self.options.get("max_new_tokens", 0))
        most_of_prompt = sys.maxsize if positions is None else positions - new
        if self._num_tokens(self._asked(article, "")) >= most_of_prompt:
            rule = f"must leave room for an article within the model's {positions} positions"
            raise ConfigError("--max-new-tokens", rule, new, "Take fewer.")
        text = article.text
        ids = self._ids(text)
        begun, count = text, len(ids)
        while count:  # text that was cut, or that the request surrounds, may have more tokens than before
            excess = len(self._ids(begun)) - self.max_input_tokens
            excess = max(excess, self._num_tokens(self._asked(article, begun)) - most_of_prompt)
            if excess <= 0:
                break
            count = max(count - excess, 0)
            begun = self._decoded(ids[:count], text)
        return begun

    def _ids(self, text: str) -> list[int]:
        ids: list[int] = self.tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
        return ids

    def _decoded(self, ids: list[int], text: str) -> str:
        """The beginning of a text, without the character that the ids end within."""
        begun: str = self.tokenizer.decode(ids)
        return begun if text.startswith(begun) else begun.rstrip(REPLACEMENT)

    def _num_tokens(self, prompt: str) -> int:
        return len(self._rows([prompt])[0])

    def _rows(self, prompts: Sequence[str]) -> list[list[int]]:
        is_chat = getattr(self.tokenizer, "chat_template", None) is not None
        encoded = self.tokenizer(list(prompts), add_special_tokens=not is_chat, verbose=False)
        rows: list[list[int]] = encoded["input_ids"]
        return rows

    def _encode(self, prompts: Sequence[str]) -> dict[str, torch.Tensor]:
        """Token ids and mask, `(batch, length)` each, padded on the left."""
        rows = self._rows(prompts)
        padding = self.tokenizer.pad_token_id or 0  # many models have no such token
        ids, mask = left_padded(rows, input_device(self.model), padding)
        return {"input_ids": ids, "attention_mask": mask}

    def _without_padding(self, token_ids: list[int]) -> list[int]:
        config = self.model.generation_config
        eos = config.eos_token_id if config is not None else None
        ends = set(eos) if isinstance(eos, list) else {eos}
        length = next((place + 1 for place, token in enumerate(token_ids) if token in ends), len(token_ids))
        return token_ids[:length]


def summarize_all(
    summarizer: Summarizer, articles: Sequence[Article], ways: Mapping[str, Mapping[str, Any]]
) -> dict[str, Summaries]:
    """Summarise all articles by every way, batch by batch in turn, after one batch to warm up.

    A machine's speed drifts, so the ways take turns, and each goes first equally often. What the model remembers of
    the batch to warm up is forgotten. Ctrl-C leaves the batches that every way has summarised.

    Raises:
        KeyboardInterrupt: it came before there was one.
    """
    batches = list(_batches(articles, summarizer.batch_size))
    known = state_of(summarizer.model).method_state
    with using_method_state(summarizer.model, copy.deepcopy(known)):
        for how in ways.values():
            summarizer.write(batches[0], Summaries(), how)
    written = {name: Summaries() for name in ways}
    names, whole = list(ways), dict[str, tuple[int, float]]()
    try:
        for turn, batch in enumerate(batches):
            for name in names[turn % len(names) :] + names[: turn % len(names)]:
                summarizer.write(batch, written[name], ways[name])
            whole = {name: (len(found.texts), found.seconds) for name, found in written.items()}
    except KeyboardInterrupt:
        if not whole:
            raise
        for name, (count, seconds) in whole.items():
            found = written[name]
            written[name] = Summaries(found.token_ids[:count], found.texts[:count], seconds)
    return written


def _batches(articles: Sequence[Article], size: int) -> Iterator[Sequence[Article]]:
    for start in range(0, len(articles), size):
        yield articles[start : start + size]
