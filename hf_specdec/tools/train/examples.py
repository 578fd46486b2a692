"""Examples that a head learns from, made of prompts, chats and texts, and batches of them.

The target writes what is missing. What it has to write is asked for by generators: each yields a `Request` and is sent
the tokens.
"""

import random
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import Dataset
from transformers import EvalPrediction

from hf_specdec.api.many_prompts.prompt_inputs import chat_text
from hf_specdec.errors import ConfigError
from hf_specdec.tools.prompt_lines import NotAPromptError, read_value
from hf_specdec.tools.train.config import HeadTraining

Item = str | Mapping[str, Any] | Sequence[Mapping[str, Any]] | None  # `None`: the target writes from its first token on
Message = Mapping[str, Any]
MARK = "\u2063user\u2063"  # of a message, to find what a chat template writes before it


@dataclass(frozen=True, slots=True)
class Example:
    """One text.

    Attributes:
        ids (`list[int]`): token ids.
        num_prompt_tokens (`int`): tokens at the beginning, one or more, that are read and not learned.
    """

    ids: list[int]
    num_prompt_tokens: int


@dataclass(frozen=True, slots=True)
class Request:
    """Tokens that the target has to write after `ids`, at a temperature or, at 0, greedily."""

    ids: list[int]
    temperature: float


Entry = tuple[str, Any]  # kind, "own", "prompt", "chat" or "text", and content
Examples = Generator[Request, list[int], list[Example]]


class ExampleReader:
    """Reads prompts, chats and texts.

    Args:
        tokenizer: the target's.
        first_token: id of the token that a text begins with where there is no prompt.
    """

    def __init__(self, tokenizer: Any, first_token: int | None, config: HeadTraining) -> None:
        self.tokenizer, self.first_token, self.config = tokenizer, first_token, config
        self.has_template = bool(getattr(tokenizer, "chat_template", None))

    def read(self, item: Item) -> Entry:
        """Kind and content of one item: a prompt, the messages of a chat, or a mapping as in a line of a `.jsonl` file.

        Raises:
            ConfigError: it is none of these, or is a chat and there is no chat template.
        """
        match item:
            case None:
                return "own", None
            case {"text": str(text)} if text:
                return "text", text
            case {"messages": [*messages]} | [*messages] if _is_chat(messages):
                return "chat", self._checked(messages)
        try:
            line = read_value(item)
        except NotAPromptError as error:
            raise ConfigError("data", str(error), item, "Correct it, or take it out.") from error
        return ("chat", self._checked(line.chat)) if line.is_chat else ("prompt", line.text)

    def examples(self, entry: Entry, temperature: float) -> Examples:
        """The examples of what `read` gave; what the target writes is of this temperature."""
        match entry:
            case "text", text:
                ids = self._ids(text)[: self.config.max_length]
                return [Example(ids, 1)] if len(ids) > 1 else []
            case "prompt", text:
                return (yield from self._continued(self._ids(text), temperature))
            case "chat", messages:
                return (yield from self._chat(messages, temperature))
        return (yield from self._own_text(temperature))

    def _checked(self, messages: Sequence[Message]) -> Sequence[Message]:
        """Messages as they are learned; raise where there is no chat template."""
        if not self.has_template:
            rule, remedy = "must have a chat template for chats", "Use the tokenizer of a chat model."
            raise ConfigError("tokenizer", rule, getattr(self.tokenizer, "name_or_path", None), remedy)
        return [m for m in messages if m["role"] != "assistant"] if self.config.regenerate else messages

    def _own_text(self, temperature: float) -> Examples:
        """A text of the target alone; of a chat model the message of a user and the answer to it."""
        if self.has_template:
            before = chat_text(self.tokenizer, [{"role": "user", "content": MARK}]).partition(MARK)[0]
            question = yield Request(self._ids(before, is_chat=True), 1.0)
            text = self.tokenizer.decode(question, skip_special_tokens=True).strip()
            return (yield from self._chat([{"role": "user", "content": text}], temperature)) if text else []
        if self.first_token is None:
            remedy = "Give prompts, chats or texts."
            raise ConfigError("data", "must be given for a model without bos_token_id or chat template", None, remedy)
        return (yield from self._continued([self.first_token], temperature or 1.0))

    def _continued(self, prompt: list[int], temperature: float) -> Examples:
        """A prompt and what the target writes after it; nothing where it is too long."""
        if not prompt or len(prompt) + self.config.max_new_tokens > self.config.max_length:
            return []
        answer = yield Request(prompt, temperature)
        return [Example(prompt + answer, len(prompt))]

    def _chat(self, messages: Sequence[Message], temperature: float) -> Examples:
        """An example for each answer; where a user's message has none, the target writes it."""
        examples: list[Example] = []
        chat: list[Message] = []
        for place, message in enumerate(messages):
            if message["role"] == "assistant" and chat:
                examples += self._answered(chat, message)
            chat.append(message)
            following = messages[place + 1]["role"] if place + 1 < len(messages) else "user"
            if message["role"] == "user" and following == "user":
                written = yield from self._continued(
                    self._ids(chat_text(self.tokenizer, chat), is_chat=True), temperature
                )
                if not written:
                    return examples
                examples += written
                answer = written[0].ids[written[0].num_prompt_tokens :]
                text = self.tokenizer.decode(answer, skip_special_tokens=True).strip()
                chat.append({"role": "assistant", "content": text})
        return examples

    def _answered(self, chat: Sequence[Message], answer: Message) -> list[Example]:
        """A chat and the answer that the data give to it; nothing where it is too long."""
        whole = self.tokenizer.apply_chat_template([*chat, answer], tokenize=False)
        prompt = self._ids(chat_text(self.tokenizer, chat), is_chat=True)
        ids = self._ids(whole, is_chat=True)[: self.config.max_length]
        is_begun = ids[: len(prompt)] == prompt
        return [Example(ids, len(prompt))] if is_begun and len(ids) > len(prompt) else []

    def _ids(self, text: str, *, is_chat: bool = False) -> list[int]:
        """Token ids; a chat template writes the special tokens itself."""
        return list(self.tokenizer(text, add_special_tokens=not is_chat, verbose=False)["input_ids"])


def examples_of_batch(
    generators: Sequence[Examples], write: Callable[[list[Request]], list[list[int]]]
) -> Iterator[list[Example]]:
    """The examples of each generator; `write` gives the tokens for the requests of all of them at once."""
    results: dict[int, list[Example]] = {}
    answers: dict[int, list[int] | None] = dict.fromkeys(range(len(generators)))
    while answers:
        requests: dict[int, Request] = {}
        for index, answer in answers.items():
            try:
                requests[index] = next(generators[index]) if answer is None else generators[index].send(answer)
            except StopIteration as stop:
                results[index] = stop.value
        written = write(list(requests.values())) if requests else []
        answers = dict(zip(requests, written, strict=True))
    for index in range(len(generators)):
        yield results[index]


def _is_chat(messages: Sequence[Any]) -> bool:
    """Return True for messages with a role and a text each, at least one from the user."""
    texts = [m.get(key) for m in messages if isinstance(m, Mapping) for key in ("role", "content")]
    is_whole = len(texts) == 2 * len(messages) and all(isinstance(text, str) for text in texts)
    return is_whole and "user" in texts[::2]


class Texts(Dataset[dict[str, Any]]):
    """Examples as `transformers.Trainer` reads them."""

    def __init__(self, examples: Sequence[Example]) -> None:
        self.examples = examples

    def __len__(self) -> int:
        return len(self.examples)

    def __getitem__(self, index: int) -> dict[str, Any]:
        example = self.examples[index]
        return {"input_ids": example.ids, "num_prompt_tokens": example.num_prompt_tokens}


def in_batches(examples: Sequence[Example], batch_size: int, seed: int) -> list[Example]:
    """The examples in an order that puts those of about one length into one batch, and the batches in a drawn order.

    It is the same in every epoch, so that a resumed training sees what an uninterrupted one sees.
    """
    ordered = sorted(examples, key=lambda example: len(example.ids))
    rest = ordered[: len(ordered) % batch_size]
    batches = [ordered[start : start + batch_size] for start in range(len(rest), len(ordered), batch_size)]
    random.Random(seed).shuffle(batches)
    return [example for batch in [*batches, rest] for example in batch]


def collated(rows: Sequence[Mapping[str, Any]]) -> dict[str, torch.Tensor]:
    """Texts padded in front, so that what is learned begins in the same column in all of them, and behind their ends.

    Returns:
        input_ids, attention_mask, learned: `(N, L)`; first: `(N,)`, the column where `learned` begins.
    """
    first = max(row["num_prompt_tokens"] for row in rows)
    fronts = [first - row["num_prompt_tokens"] for row in rows]
    ids = [torch.tensor([0] * front + row["input_ids"]) for front, row in zip(fronts, rows, strict=True)]
    seen = [torch.tensor([0] * front + [1] * len(row["input_ids"])) for front, row in zip(fronts, rows, strict=True)]
    attention_mask = pad_sequence(seen, batch_first=True)
    learned = attention_mask.bool()
    learned[:, :first] = False
    return {
        "input_ids": pad_sequence(ids, batch_first=True),
        "attention_mask": attention_mask,
        "learned": learned,
        "first": torch.full((len(rows),), first),
    }


def measured(prediction: EvalPrediction) -> dict[str, Any]:
    """Acceptance over an evaluation: `accepted`, the share of positions by draft step, and `tokens_per_step`."""
    accepted, num_positions = prediction.predictions
    rates = (accepted.sum(0) / max(int(num_positions.sum()), 1)).tolist()
    return {"accepted": rates, "tokens_per_step": 1.0 + sum(rates)}
