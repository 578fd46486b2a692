"""Fields of requests: log-probabilities, several texts, penalties and stop strings, each against plain generation."""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import openai
import pytest
import torch

from hf_specdec.tools.serve.protocol import ChatRequest, CompletionRequest
from hf_specdec.tools.serve.responses import ResponsesRequest
from tests.helpers.support import plain
from tests.serve.conftest import NAME
from tests.serve.test_server import PROMPTS, expected

PROMPT = PROMPTS[1]
CHAT_PROMPT = "# user: write a stack\n# assistant:"


def test_the_guide_names_each_field_and_no_other() -> None:
    """Its tables have the fields of every endpoint; those that they call refused are of none."""
    guide = (Path(__file__).parents[2] / "docs/guides/serve.md").read_text("utf-8")
    taken = {name for body in (ChatRequest, CompletionRequest, ResponsesRequest) for name in body.model_fields}
    rows = [line for line in guide.splitlines() if line.startswith("| ")]
    named = {one.partition(".")[0] for row in rows for one in re.findall(r"`([a-z_.]+)", row)}
    assert taken <= named
    for row in rows:
        if (kind := re.match(r"\| refused in (chats|text)", row)) is not None:
            body = ChatRequest if kind[1] == "chats" else CompletionRequest
            assert not body.model_fields.keys() & set(re.findall(r"`([a-z_]+)`", row)) - {"best_of", "echo"}


def plain_logprobs(model: Any, tokenizer: Any, prompt: str, **options: Any) -> tuple[list[int], torch.Tensor]:
    """Plain generation's tokens and the log-probabilities of the vocabulary at each of them."""
    ids = tokenizer(prompt, return_tensors="pt").input_ids
    output = plain(model, ids, max_new_tokens=12, return_dict_in_generate=True, output_logits=True, **options)
    return output.sequences[0, ids.shape[1] :].tolist(), torch.cat(output.logits).float().log_softmax(dim=-1)


def check_tops(tops: Sequence[dict[str, float]], wanted: torch.Tensor, tokenizer: Any) -> None:
    """The best tokens of each place are those of plain generation, whose order may differ where they are alike."""
    for told, row in zip(tops, wanted, strict=True):
        best = row.topk(len(told))
        assert list(told) == [tokenizer.decode([token]) for token in best.indices]
        assert list(told.values()) == pytest.approx(best.values.tolist(), abs=1e-4)


@pytest.mark.parametrize("is_streamed", [False, True])
@pytest.mark.parametrize(
    "options",
    [
        {"temperature": 0},
        {"temperature": 0.7, "seed": 5, "top_p": 0.9},
        {"temperature": 0, "logit_bias": {"70": 4}, "extra_body": {"repetition_penalty": 1.3}},
    ],
    ids=["greedy", "sampled", "with penalties"],
)
def test_log_probabilities_are_the_model_s_own(
    client: openai.OpenAI, target: Any, chat_tokenizer: Any, options: dict[str, Any], is_streamed: bool
) -> None:
    """Before temperature, penalties and bias, whose tokens they are nonetheless."""
    given: dict[str, Any] = {"do_sample": options["temperature"] > 0}
    if given["do_sample"]:
        given |= {"temperature": 0.7, "top_p": 0.9}
        torch.manual_seed(5)
    if "logit_bias" in options:
        given |= {"sequence_bias": [[[70], 4.0]], "repetition_penalty": 1.3}
    tokens, wanted = plain_logprobs(target, chat_tokenizer, CHAT_PROMPT, **given)
    asked = {"model": NAME, "max_tokens": 12, "logprobs": True, "top_logprobs": 3, "stream": is_streamed, **options}
    found = client.chat.completions.create(messages=[{"role": "user", "content": "write a stack"}], **asked)
    answers = list(found) if is_streamed else [found]
    entries = [entry for answer in answers if (told := answer.choices[0].logprobs) for entry in told.content]
    assert [entry.token for entry in entries] == [chat_tokenizer.decode([token]) for token in tokens]
    assert [entry.logprob for entry in entries] == pytest.approx(
        [float(row[token]) for row, token in zip(wanted, tokens, strict=True)], abs=1e-4
    )
    check_tops([{top.token: top.logprob for top in one.top_logprobs} for one in entries], wanted, chat_tokenizer)
    assert b"".join(bytes(entry.bytes) for entry in entries).decode() == chat_tokenizer.decode(tokens)


@pytest.mark.parametrize("is_streamed", [False, True])
def test_text_completions_have_log_probabilities_in_columns(
    client: openai.OpenAI, target: Any, chat_tokenizer: Any, is_streamed: bool
) -> None:
    tokens, wanted = plain_logprobs(target, chat_tokenizer, PROMPT, do_sample=False)
    found = client.completions.create(
        model=NAME, prompt=PROMPT, max_tokens=12, temperature=0, logprobs=2, stream=is_streamed
    )
    told = [answer.choices[0].logprobs for answer in (list(found) if is_streamed else [found])]
    columns = [column for column in told if column is not None]
    texts = [text for column in columns for text in column.tokens]
    assert texts == [chat_tokenizer.decode([token]) for token in tokens]
    offsets = [offset for column in columns for offset in column.text_offset]
    assert offsets == [len("".join(texts[:count])) for count in range(len(texts))]
    check_tops([top for column in columns for top in column.top_logprobs], wanted, chat_tokenizer)


def test_log_probabilities_end_with_the_text(client: openai.OpenAI, target: Any, chat_tokenizer: Any) -> None:
    """Tokens of a stop string have none, nor has the end of text."""
    whole = expected(target, chat_tokenizer, PROMPT)
    options: dict[str, Any] = {"model": NAME, "prompt": PROMPT, "max_tokens": 16, "temperature": 0, "logprobs": 0}
    choice = client.completions.create(**options, stop=["never", whole[4:7]]).choices[0]
    assert choice.text == whole[: whole.index(whole[4:7])]
    assert "".join(choice.logprobs.tokens).startswith(choice.text)  # type: ignore[union-attr, arg-type]
    assert choice.logprobs.text_offset[-1] < len(choice.text)  # type: ignore[union-attr, index]


@pytest.mark.parametrize("is_streamed", [False, True])
def test_each_of_several_texts_has_a_seed_of_its_own(
    client: openai.OpenAI, target: Any, chat_tokenizer: Any, is_streamed: bool
) -> None:
    found = client.completions.create(
        model=NAME, prompt=PROMPT, max_tokens=12, temperature=1.2, seed=11, n=3, stream=is_streamed
    )
    texts = ["", "", ""]
    for answer in list(found) if is_streamed else [found]:
        for choice in answer.choices:
            texts[choice.index] += choice.text
    wanted = []
    for number in range(3):
        torch.manual_seed(11 + number)
        options = {"max_new_tokens": 12, "do_sample": True, "temperature": 1.2}
        wanted.append(expected(target, chat_tokenizer, PROMPT, **options))
    assert texts == wanted
    assert len(set(texts)) == 3
    if not is_streamed:
        assert found.usage.completion_tokens == 36


def test_several_texts_without_a_seed_differ(client: openai.OpenAI) -> None:
    answer = client.completions.create(model=NAME, prompt=PROMPT, max_tokens=12, temperature=1.5, n=4)
    assert len({choice.text for choice in answer.choices}) > 1


class Penalties:
    """Presence and frequency penalties for plain generation, a token at a time."""

    def __init__(self, presence: float, frequency: float, length: int) -> None:
        self.presence, self.frequency, self.length = presence, frequency, length

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        new, scores = input_ids[0, self.length :].tolist(), scores.clone()
        for token in set(new):
            scores[0, token] -= self.presence + self.frequency * new.count(token)
        return scores


@pytest.mark.parametrize("method", ["prompt_lookup", "auto", "lookahead"])
@pytest.mark.parametrize(("presence", "frequency"), [(1.5, 0.0), (0.0, 1.1), (-0.5, 0.7)])
def test_penalties_are_of_the_answer_s_own_tokens(
    client: openai.OpenAI, target: Any, chat_tokenizer: Any, method: str, presence: float, frequency: float
) -> None:
    length = len(chat_tokenizer(PROMPT).input_ids)
    wanted = expected(
        target,
        chat_tokenizer,
        PROMPT,
        max_new_tokens=40,
        logits_processor=[Penalties(presence, frequency, length)],
    )
    answer = client.completions.create(
        model=NAME,
        prompt=PROMPT,
        max_tokens=40,
        temperature=0,
        presence_penalty=presence,
        frequency_penalty=frequency,
        extra_body={"spec_method": method},
    )
    assert answer.choices[0].text == wanted
    assert wanted != expected(target, chat_tokenizer, PROMPT, max_new_tokens=40)
