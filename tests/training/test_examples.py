"""Prompts, chats and texts become examples; what is missing the target writes."""

from typing import Any

import pytest

from hf_specdec import ConfigError
from hf_specdec.tools.train import HeadTraining
from hf_specdec.tools.train.examples import Example, ExampleReader, Request, examples_of_batch
from tests.training.conftest import WordNumbers

USER, ASSISTANT = 38, 39  # tokens of the template
CONFIG = HeadTraining(max_length=12, max_new_tokens=4)


class ChatNumbers(WordNumbers):
    """Words are token ids; every message begins with its role's."""

    chat_template = "a template"

    def __call__(self, text: str, **_: Any) -> dict[str, list[int]]:
        return {"input_ids": [int(word) if word.isdigit() else 0 for word in text.split()]}

    def apply_chat_template(self, messages: Any, *, tokenize: bool, add_generation_prompt: bool = False) -> str:
        roles = {"user": USER, "assistant": ASSISTANT}
        said = [f"{roles[message['role']]} {message['content']}" for message in messages]
        return " ".join([*said, *([str(ASSISTANT)] if add_generation_prompt else [])])


def user(content: str) -> dict[str, str]:
    return {"role": "user", "content": content}


def assistant(content: str) -> dict[str, str]:
    return {"role": "assistant", "content": content}


def read(
    *items: Any, config: HeadTraining = CONFIG, tokenizer: Any = None
) -> tuple[list[list[Example]], list[Request]]:
    """The examples of each item, and what the target was to write; it writes 7 8."""
    reader = ExampleReader(ChatNumbers() if tokenizer is None else tokenizer, 1, config)
    requests: list[Request] = []

    def write(batch: list[Request]) -> list[list[int]]:
        requests.extend(batch)
        return [[7, 8]] * len(batch)

    return list(examples_of_batch([reader.examples(reader.read(item), 0.7) for item in items], write)), requests


@pytest.mark.parametrize("item", ["3 4", {"prompt": "3 4"}], ids=str)
def test_the_target_continues_prompts(item: Any) -> None:
    assert read(item) == ([[Example([3, 4, 7, 8], 2)]], [Request([3, 4], 0.7)])


def test_texts_are_learned_as_they_are_and_cut_to_the_longest() -> None:
    long = " ".join(["5"] * 30)
    assert read({"text": "3 4 5"}, {"text": long}) == ([[Example([3, 4, 5], 1)], [Example([5] * 12, 1)]], [])


def test_answers_of_a_chat_are_learned() -> None:
    chat = [user("3"), assistant("4"), user("5"), assistant("6")]
    first, second = Example([USER, 3, ASSISTANT, 4], 3), Example([USER, 3, ASSISTANT, 4, USER, 5, ASSISTANT, 6], 7)
    assert read(chat, {"messages": chat}) == ([[first, second]] * 2, [])


def test_the_target_answers_where_a_chat_has_no_answer() -> None:
    """Between two messages of a user too, and with what it said before in view."""
    expected = [
        Example([USER, 3, ASSISTANT, 7, 8], 3),
        Example([USER, 3, ASSISTANT, 7, 8, USER, 5, ASSISTANT, 7, 8], 8),
    ]
    for item in ([user("3"), user("5")], {"turns": ["3", "5"]}):
        assert read(item)[0] == [expected]


def test_the_target_answers_anew_where_it_is_to() -> None:
    config = HeadTraining(max_length=12, max_new_tokens=4, regenerate=True)
    assert read([user("3"), assistant("4")], config=config)[0] == [[Example([USER, 3, ASSISTANT, 7, 8], 3)]]


def test_prompts_that_leave_no_room_are_left_out() -> None:
    long = " ".join(["5"] * 9)
    assert read(long, [user(long)], [user("3"), user(long)]) == (
        [[], [], [Example([USER, 3, ASSISTANT, 7, 8], 3)]],
        [Request([USER, 3, ASSISTANT], 0.7)],
    )


def test_without_data_a_chat_model_writes_the_user_s_message_too() -> None:
    examples, requests = read(None)
    assert requests == [Request([USER], 1.0), Request([USER, 7, 8, ASSISTANT], 0.7)]
    assert examples == [[Example([USER, 7, 8, ASSISTANT, 7, 8], 4)]]


def test_without_data_or_template_texts_begin_with_the_first_token() -> None:
    assert read(None, tokenizer=WordNumbers()) == ([[Example([1, 7, 8], 1)]], [Request([1], 0.7)])
    reader = ExampleReader(WordNumbers(), None, CONFIG)
    with pytest.raises(ConfigError, match="`data` must be given for a model without bos_token_id or chat template"):
        list(examples_of_batch([reader.examples(reader.read(None), 0.0)], lambda _: []))


@pytest.mark.parametrize(
    "item", ["", {}, [], [{"role": "user"}], {"messages": [assistant("3")]}, {"text": ""}, 3], ids=str
)
def test_what_is_no_prompt_chat_or_text_is_refused(item: Any) -> None:
    with pytest.raises(ConfigError, match="`data` must "):
        read(item)


def test_a_tokenizer_without_a_template_reads_no_chats() -> None:
    with pytest.raises(ConfigError, match="`tokenizer` must have a chat template"):
        read([user("3")], tokenizer=WordNumbers())
