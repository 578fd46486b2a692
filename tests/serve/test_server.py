"""The server over loopback, through the real client: plain generation's texts, whoever else is being served."""

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import openai
import pytest
import torch

from hf_specdec.methods.registry import as_head
from hf_specdec.tools.serve.protocol import CompletionRequest
from hf_specdec.tools.serve.requests import RequestReader
from tests.helpers.head_models import build_gemma, random_assistant
from tests.helpers.heads import random_head
from tests.helpers.support import plain
from tests.serve.conftest import NAME, serving

PROMPTS = [f"def function_{number}(items):\n    return " for number in range(20)]


def expected(model: Any, tokenizer: Any, prompt: str, **options: Any) -> str:
    """What plain generation writes after the prompt."""
    ids = tokenizer(prompt, return_tensors="pt").input_ids
    new = plain(model, ids, **{"max_new_tokens": 16, "do_sample": False, **options})[0, ids.shape[1] :]
    return str(tokenizer.decode(new, skip_special_tokens=True))


@pytest.mark.at_most(2)
@pytest.mark.parametrize("method", ["prompt_lookup", "lookahead", "auto", "none"])
def test_a_completion_is_plain_generation_s(
    client: openai.OpenAI, target: Any, chat_tokenizer: Any, method: str
) -> None:
    answer = client.completions.create(
        model=NAME, prompt=PROMPTS[0], max_tokens=16, temperature=0, extra_body={"spec_method": method}
    )
    assert answer.choices[0].text == expected(target, chat_tokenizer, PROMPTS[0])
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage is not None and answer.usage.completion_tokens == 16
    extra = answer.usage.model_extra or {}
    assert extra["spec_stats"]["method"] == ("plain" if method == "none" else method)
    assert extra["spec_stats"]["plain_reason"] is None


def test_a_chat_is_asked_through_the_template(client: openai.OpenAI, target: Any, chat_tokenizer: Any) -> None:
    messages: Any = [{"role": "user", "content": [{"type": "text", "text": "write a stack"}]}]
    answer = client.chat.completions.create(model=NAME, messages=messages, max_completion_tokens=12, temperature=0)
    wanted = expected(target, chat_tokenizer, "# user: write a stack\n# assistant:", max_new_tokens=12)
    assert answer.choices[0].message.content == wanted


def test_twenty_streams_at_once_are_twenty_answers(client: openai.OpenAI, target: Any, chat_tokenizer: Any) -> None:
    """Nothing of one is in another, and each arrives in pieces."""

    def stream(prompt: str) -> tuple[str, int]:
        events = client.completions.create(model=NAME, prompt=prompt, max_tokens=8, temperature=0, stream=True)
        pieces = [event.choices[0].text for event in events]
        return "".join(pieces), sum(bool(piece) for piece in pieces)

    with ThreadPoolExecutor(20) as pool:
        answers = list(pool.map(stream, PROMPTS))
    wanted = [expected(target, chat_tokenizer, prompt, max_new_tokens=8) for prompt in PROMPTS]
    assert [text for text, _ in answers] == wanted
    assert all(num_pieces > 1 for _, num_pieces in answers)


def test_a_stream_ends_with_usage_if_it_is_wanted(client: openai.OpenAI) -> None:
    events = list(
        client.chat.completions.create(
            model=NAME,
            messages=[{"role": "user", "content": "x"}],
            max_tokens=8,
            stream=True,
            stream_options={"include_usage": True},
        )
    )
    assert events[0].choices[0].delta.role == "assistant"
    assert events[-2].choices[0].finish_reason == "length"
    assert events[-1].usage is not None and events[-1].usage.completion_tokens == 8


def test_an_answer_that_ends_by_itself_with_its_last_token_has_stopped(
    target: Any, chat_tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = chat_tokenizer(expected(target, chat_tokenizer, PROMPTS[0])).input_ids
    count = next(place for place in range(2, len(whole)) if whole[place] not in whole[:place]) + 1
    monkeypatch.setattr(target.generation_config, "eos_token_id", [0, whole[count - 1]])
    with (
        serving(target, chat_tokenizer) as url,
        openai.OpenAI(base_url=url, api_key="none", max_retries=0) as client,
    ):
        answers = [
            client.completions.create(model=NAME, prompt=PROMPTS[0], max_tokens=most, temperature=0)
            for most in (count - 1, count, count + 1)
        ]
    assert [answer.choices[0].finish_reason for answer in answers] == ["length", "stop", "stop"]
    assert [answer.usage.completion_tokens for answer in answers if answer.usage] == [count - 1, count, count]


@pytest.mark.parametrize("stream", [False, True])
def test_a_stop_string_ends_the_text_before_it(
    client: openai.OpenAI, target: Any, chat_tokenizer: Any, stream: bool
) -> None:
    whole = expected(target, chat_tokenizer, PROMPTS[0])
    stop = whole[5:8]
    options: dict[str, Any] = {"model": NAME, "prompt": PROMPTS[0], "temperature": 0, "stop": stop}
    if stream:
        events = list(client.completions.create(**options, stream=True))
        text, reason = "".join(event.choices[0].text for event in events), events[-1].choices[0].finish_reason
    else:
        answer = client.completions.create(**options)
        text, reason = answer.choices[0].text, answer.choices[0].finish_reason
    assert text == whole[: whole.index(stop)]
    assert reason == "stop"


@pytest.mark.parametrize("stream", [False, True])
def test_a_stop_string_that_begins_in_the_prompt_is_none(
    client: openai.OpenAI, target: Any, chat_tokenizer: Any, stream: bool
) -> None:
    whole = expected(target, chat_tokenizer, PROMPTS[0])
    stop = PROMPTS[0][-3:] + whole[0]
    assert stop not in whole
    options: dict[str, Any] = {"model": NAME, "prompt": PROMPTS[0], "temperature": 0, "stop": stop}
    found = client.completions.create(**options, stream=stream)
    events = list(found) if stream else [found]
    assert "".join(event.choices[0].text for event in events if event.choices) == whole


def test_a_seed_gives_plain_generation_s_sample(client: openai.OpenAI, target: Any, chat_tokenizer: Any) -> None:
    answer = client.completions.create(model=NAME, prompt=PROMPTS[1], max_tokens=12, temperature=0.8, seed=11)
    torch.manual_seed(11)
    wanted = expected(target, chat_tokenizer, PROMPTS[1], max_new_tokens=12, do_sample=True, temperature=0.8)
    assert answer.choices[0].text == wanted


def test_no_request_learns_from_another(client: openai.OpenAI) -> None:
    """The same prompt twice takes about as many steps: auto drafts nothing from the first answer, or two would do."""
    body = {"spec_method": "auto", "spec_config": {"num_nodes": 8, "pool": "shared"}}
    steps = []
    for _ in range(2):
        answer = client.completions.create(model=NAME, prompt=PROMPTS[3], max_tokens=16, temperature=0, extra_body=body)
        assert answer.usage is not None and answer.usage.model_extra is not None
        steps.append(answer.usage.model_extra["spec_stats"]["num_drafts"])
    assert steps[1] > 0.6 * steps[0] > 4


def streaming(client: openai.OpenAI, prompt: str) -> openai.Stream[Any]:
    """A long answer that has a place in the batch: its first token is here."""
    events: openai.Stream[Any] = client.completions.create(
        model=NAME, prompt=prompt, max_tokens=1000, temperature=0, stream=True
    )
    next(events), next(events)  # the first event comes before any token
    return events


def test_texts_are_remembered_by_api_key(target: Any, chat_tokenizer: Any) -> None:
    """The second answer of a key takes fewer steps, and the first of another as many as the first of all."""

    def steps(key: str, method: str) -> int:
        with openai.OpenAI(base_url=url, api_key=key, max_retries=0) as client:
            config = {"num_nodes": 8} if method == "auto" else {"pool": "shared"}
            body = {"spec_method": method, "spec_config": config}
            answer = client.completions.create(
                model=NAME, prompt=PROMPTS[3], max_tokens=16, temperature=0, extra_body=body
            )
        assert answer.usage is not None and answer.usage.model_extra is not None
        assert answer.choices[0].text == wanted
        return int(answer.usage.model_extra["spec_stats"]["num_drafts"])

    wanted = expected(target, chat_tokenizer, PROMPTS[3])
    with serving(target, chat_tokenizer, api_keys=("ann", "bob"), memory="key") as url:
        for method in ("auto", "prompt_lookup"):
            first, second, other = steps("ann", method), steps("ann", method), steps("bob", method)
            assert second < first
            assert other == first


def test_more_requests_than_may_wait_are_refused(target: Any, chat_tokenizer: Any) -> None:
    """Four are decoded and one waits; the sixth is told to come back, and is served once there is room."""
    with (
        serving(target, chat_tokenizer, max_queue=1) as url,
        openai.OpenAI(base_url=url, api_key="none", max_retries=0) as client,
    ):
        streams = [streaming(client, prompt) for prompt in PROMPTS[:4]]
        waiting = client.completions.create(model=NAME, prompt=PROMPTS[4], max_tokens=4, stream=True)
        with pytest.raises(openai.RateLimitError) as raised:
            client.completions.create(model=NAME, prompt=PROMPTS[5], max_tokens=4)
        assert raised.value.code == "rate_limit_exceeded"
        assert "max_queue is 1" in raised.value.message
        assert raised.value.response.headers["retry-after"] == "1"
        for events in streams:
            events.close()
        assert list(waiting)[-1].choices[0].finish_reason
        assert client.completions.create(model=NAME, prompt=PROMPTS[5], max_tokens=4, temperature=0).choices[0].text


def test_a_forward_that_fails_ends_its_requests_alone(
    target: Any, chat_tokenizer: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """Texts that shared the forward end with an error; what comes after is served."""

    def fail(module: Any, args: Any, kwargs: Any) -> None:
        hook.remove()
        raise RuntimeError("CUDA out of memory")

    with (
        serving(target, chat_tokenizer) as url,
        openai.OpenAI(base_url=url, api_key="none", max_retries=0) as client,
    ):
        streams = [streaming(client, prompt) for prompt in PROMPTS[:2]]
        hook = target.register_forward_pre_hook(fail, with_kwargs=True)
        for events in streams:
            with pytest.raises(openai.APIError, match="RuntimeError while decoding"):
                list(events)
        answer = client.completions.create(model=NAME, prompt=PROMPTS[2], temperature=0)
        assert answer.choices[0].text == expected(target, chat_tokenizer, PROMPTS[2])
    assert "CUDA out of memory" in caplog.text


def test_a_draft_head_drafts_for_the_methods_that_take_one(target: Any, chat_tokenizer: Any) -> None:
    options: dict[str, Any] = {"draft_model": random_head(target), "spec_method": "eagle3"}
    with (
        serving(target, chat_tokenizer, **options) as url,
        openai.OpenAI(base_url=url, api_key="none", max_retries=0) as client,
    ):
        answer = client.completions.create(model=NAME, prompt=PROMPTS[0], temperature=0)
        assert answer.choices[0].text == expected(target, chat_tokenizer, PROMPTS[0])
        stats = answer.usage.model_extra["spec_stats"]  # type: ignore[union-attr, index]
        assert (stats["method"], stats["plain_reason"]) == ("eagle3", None)
        assert answer.usage.completion_tokens_details.rejected_prediction_tokens > 0  # type: ignore[union-attr, operator]
        with pytest.raises(openai.BadRequestError, match="no draft model for draft_model"):
            client.completions.create(model=NAME, prompt="x", extra_body={"spec_method": "draft_model"})


def test_a_gemma_assistant_is_a_draft_model(chat_tokenizer: Any) -> None:
    model = build_gemma()
    head = as_head(random_assistant())
    reader = RequestReader(model, chat_tokenizer, NAME, "draft_model", None, 8, draft_model=head)
    inputs = reader.read(CompletionRequest(model=NAME, prompt=[5, 6, 7], temperature=0))
    assert inputs["assistant_model"] is head
    expected = plain(model, inputs["input_ids"], max_new_tokens=8, do_sample=False)
    assert torch.equal(model.generate(**inputs), expected)
    itself = reader.read(CompletionRequest(model=NAME, prompt=[5, 6, 7], spec_config={"exit_layer": 1}))
    assert "assistant_model" not in itself


def test_a_head_is_asked_for_where_there_is_none(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="no draft head for eagle3"):
        client.completions.create(model=NAME, prompt="x", extra_body={"spec_method": "eagle3"})


@pytest.mark.parametrize(("memory", "of_bob"), [("request", False), ("shared", True)])
def test_prompts_begin_with_texts_of_the_same_api_key(
    target: Any, chat_tokenizer: Any, memory: str, of_bob: bool
) -> None:
    """Of all with --memory shared; the texts stay the same."""

    def ask(key: str, question: str) -> tuple[str | None, int]:
        messages: Any = [
            {"role": "system", "content": "Answer in few words. " * 10},
            {"role": "user", "content": question},
        ]
        with openai.OpenAI(base_url=url, api_key=key, max_retries=0) as client:
            answer = client.chat.completions.create(model=NAME, messages=messages, temperature=0)
        assert answer.usage is not None
        assert answer.usage.prompt_tokens_details is not None
        return answer.choices[0].message.content, answer.usage.prompt_tokens_details.cached_tokens or 0

    with serving(target, chat_tokenizer, api_keys=("ann", "bob"), memory=memory) as url:
        first, again, other = ask("ann", "one"), ask("ann", "two"), ask("bob", "two")
    assert first[1] == 0
    assert again[1] > 40
    assert other[0] == again[0]
    assert other[1] >= again[1] if of_bob else other[1] == 0
