"""Prompts in the lines of `.jsonl` files, in the forms that data sets and benchmarks come in.

A line is a string, a text to continue, or an object that is recognised by its keys:

    prompt, text            a text to continue; a `prompt` may be a list of messages
    messages                a chat: {"role": "user", "content": "..."}, ..., from system, user and assistant
    turns                   messages of a user alone, each answered by the model
    instruction             one message, with `input` or `context` behind it where there is one
    question                one message

Next to these `id`, `question_id` or `task_id` names the prompt, and `task` or `category` the task it counts in. Answers
that end a chat are left out: the model answers. Knows nothing about tokenizers or models.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from hf_specdec.common.files import json_value, lone_surrogate

FORMS = (
    'a string, or an object with "prompt", "text", "messages", "turns", "instruction" or "question", the text not empty'
)
ROLES = ("system", "developer", "user", "assistant", "tool")

Message = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class PromptLine:
    """A prompt.

    Attributes:
        turns (`tuple[str, ...]`): messages of a user, each answered by the model; or a text alone.
        is_chat (`bool`): whether it goes through the tokenizer's chat template, where there is one.
        before (`tuple[Message, ...]`): messages before the first turn.
    """

    turns: tuple[str, ...]
    is_chat: bool = False
    before: tuple[Message, ...] = ()
    name: str | None = None
    task: str | None = None

    @property
    def text(self) -> str:
        """The text to continue where there is no chat template: all messages up to the first answer."""
        return "\n\n".join([*(message["content"] for message in self.before), self.turns[0]])

    @property
    def chat(self) -> list[Message]:
        """Its messages; the model answers before the next of two user messages in a row."""
        return [*self.before, *({"role": "user", "content": turn} for turn in self.turns)]

    def goes_through_template(self, tokenizer: Any) -> bool:
        """True for a chat where the tokenizer has a chat template."""
        return self.is_chat and bool(getattr(tokenizer, "chat_template", None))


class NotAPromptError(ValueError):
    """A line that holds no prompt; its text is the rule that the line breaks."""


def read_line(line: str) -> PromptLine:
    """Read the prompt of a line; raises NotAPromptError."""
    return read_value(json_value(line))


def read_value(value: Any) -> PromptLine:
    """Read the prompt in a line's JSON value; raises NotAPromptError."""
    fields = value if isinstance(value, dict) else {}
    name = next((str(fields[key]) for key in ("id", "question_id", "task_id") if key in fields), None)
    task = next((fields[key] for key in ("task", "category") if isinstance(fields.get(key), str)), None)
    before: list[Message] = []
    match value:
        case str(text) | {"prompt": str(text)} | {"text": str(text)}:
            turns, is_chat = [text], False
        case {"messages": [*messages]} | {"prompt": [*messages]}:
            (before, turns), is_chat = _split(messages), True
        case {"turns": [*turns]}:
            is_chat = True
        case {"instruction": str(text), "input": str(more)} | {"instruction": str(text), "context": str(more)} if more:
            turns, is_chat = [f"{text}\n\n{more}"], True
        case {"instruction": str(text)} | {"question": str(text)}:
            turns, is_chat = [text], True
        case _:
            raise NotAPromptError(f"must be {FORMS}")
    if not turns or not all(isinstance(turn, str) and turn for turn in turns):
        raise NotAPromptError("must have turns of text, none of them empty")
    for text in (*(message["content"] for message in before), *turns):
        if (place := lone_surrogate(text)) is not None:
            raise NotAPromptError(f"must be Unicode text, but character {place} is half of a pair")
    return PromptLine(tuple(turns), is_chat, tuple(before), name, task)


def _split(messages: list[Any]) -> tuple[list[Message], list[str]]:
    """Messages before the first that the model answers, and texts of users from there on."""
    for message in messages:
        match message:
            case {"role": str(role), "content": str()} if role in ROLES:
                pass
            case _:
                raise NotAPromptError(f'must have messages with "role" ({", ".join(ROLES)}) and "content", a text')
    while messages and messages[-1]["role"] == "assistant":
        messages = messages[:-1]
    start = len(messages)
    while start and messages[start - 1]["role"] == "user":
        start -= 1
    if start == len(messages):
        raise NotAPromptError("must end with a message of a user, answers left out")
    return messages[:start], [message["content"] for message in messages[start:]]
