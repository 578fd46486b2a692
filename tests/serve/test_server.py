"""The server over loopback, through the real client: plain generation's texts, whoever else is being served."""

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import openai
import pytest
import torch
from openai.types.chat import ChatCompletion, ChatCompletionChunk

from hf_specdec.methods.prompt_lookup.config import PromptLookupConfig
from tests.helpers.heads import random_head
from tests.helpers.support import plain
from tests.serve.conftest import NAME, connected, serving

PROMPTS = [f"def function_{number}(items):\n    return " for number in range(12)]
CHAT_PROMPT = "# user: write a stack\n# assistant:"
MESSAGES: Any = [{"role": "user", "content": [{"type": "text", "text": "write a stack"}]}]
GREEDY: dict[str, Any] = {"model": NAME, "prompt": PROMPTS[0], "temperature": 0}


def expected(model: Any, tokenizer: Any, prompt: str, **options: Any) -> str:
    """What plain generation writes after the prompt."""
    ids = tokenizer(prompt, return_tensors="pt").input_ids
    new = plain(model, ids, **{"max_new_tokens": 16, "do_sample": False, **options})[0, ids.shape[1] :]
    return str(tokenizer.decode(new, skip_special_tokens=True))


def spec_stats(answer: Any) -> dict[str, Any]:
    stats: dict[str, Any] = answer.usage.model_extra["spec_stats"]
    return stats


@pytest.mark.at_most(2)
@pytest.mark.parametrize("method", ["prompt_lookup", "lookahead", "auto", "plain"])
def test_a_completion_is_plain_generation_s(target: Any, chat_tokenizer: Any, method: str) -> None:
    with connected(target, chat_tokenizer, spec_method=method) as client:
        answer = client.completions.create(**GREEDY, max_tokens=16)
    assert answer.choices[0].text == expected(target, chat_tokenizer, PROMPTS[0])
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage is not None and answer.usage.completion_tokens == 16
    stats = spec_stats(answer)
    assert stats.keys().isdisjoint({"num_forwards", "verify_seconds"}), "what is counted of the whole batch"
    assert (stats["method"], stats["plain_reason"]) == (method, None)


def test_a_chat_is_asked_through_the_template(client: openai.OpenAI, target: Any, chat_tokenizer: Any) -> None:
    options: dict[str, Any] = {"model": NAME, "messages": MESSAGES, "max_completion_tokens": 12, "temperature": 0}
    wanted = expected(target, chat_tokenizer, CHAT_PROMPT, max_new_tokens=12)
    whole = client.chat.completions.create(**options)
    assert ChatCompletion.model_validate(whole.model_dump()).choices[0].message.content == wanted
    events: Any = list(client.chat.completions.create(**options, stream=True, stream_options={"include_usage": True}))
    assert "".join(event.choices[0].delta.content or "" for event in events[:-1]) == wanted
    assert ChatCompletionChunk.model_validate(events[0].model_dump()).choices[0].delta.role == "assistant"
    assert events[-2].choices[0].finish_reason == "length"
    assert events[-1].usage.completion_tokens == 12


def test_many_streams_at_once_are_as_many_answers(client: openai.OpenAI, target: Any, chat_tokenizer: Any) -> None:
    """Nothing of one is in another, and each arrives in pieces."""

    def stream(prompt: str) -> tuple[str, int]:
        events = client.completions.create(model=NAME, prompt=prompt, max_tokens=8, temperature=0, stream=True)
        pieces = [event.choices[0].text for event in events]
        return "".join(pieces), sum(bool(piece) for piece in pieces)

    with ThreadPoolExecutor(12) as pool:
        answers = list(pool.map(stream, PROMPTS))
    wanted = [expected(target, chat_tokenizer, prompt, max_new_tokens=8) for prompt in PROMPTS]
    assert [text for text, _ in answers] == wanted
    assert all(num_pieces > 1 for _, num_pieces in answers)


def test_an_answer_that_ends_by_itself_with_its_last_token_has_stopped(
    target: Any, chat_tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = chat_tokenizer(expected(target, chat_tokenizer, PROMPTS[0])).input_ids
    count = next(place for place in range(2, len(whole)) if whole[place] not in whole[:place]) + 1
    monkeypatch.setattr(target.generation_config, "eos_token_id", [0, whole[count - 1]])
    with connected(target, chat_tokenizer) as client:
        answers = [client.completions.create(**GREEDY, max_tokens=most) for most in (count - 1, count, count + 1)]
    assert [answer.choices[0].finish_reason for answer in answers] == ["length", "stop", "stop"]
    assert [answer.usage.completion_tokens for answer in answers if answer.usage] == [count - 1, count, count]


@pytest.mark.parametrize("is_streamed", [False, True])
def test_a_stop_string_ends_the_text_before_it(
    client: openai.OpenAI, target: Any, chat_tokenizer: Any, is_streamed: bool
) -> None:
    """With its token, so no further one is computed; one that begins in the prompt is none."""
    whole = expected(target, chat_tokenizer, PROMPTS[0])
    for stop, wanted in (
        (["never", whole[5:8]], whole[: whole.index(whole[5:8])]),
        (PROMPTS[0][-3:] + whole[0], whole),
    ):
        answer: Any = client.completions.create(**GREEDY, stop=stop, stream=is_streamed)
        events = list(answer) if is_streamed else [answer]
        assert "".join(event.choices[0].text for event in events) == wanted
        assert events[-1].choices[0].finish_reason == ("length" if wanted == whole else "stop")
        if not is_streamed:
            assert answer.usage.completion_tokens == (16 if wanted == whole else stop_length(chat_tokenizer, whole))


def stop_length(tokenizer: Any, whole: str) -> int:
    """Tokens of a text up to its eighth character."""
    ids = tokenizer(whole).input_ids
    return next(count for count in range(len(ids)) if len(tokenizer.decode(ids[:count])) >= 8)


def test_a_seed_gives_plain_generation_s_sample(client: openai.OpenAI, target: Any, chat_tokenizer: Any) -> None:
    answer = client.completions.create(model=NAME, prompt=PROMPTS[1], max_tokens=12, temperature=0.8, seed=11)
    torch.manual_seed(11)
    wanted = expected(target, chat_tokenizer, PROMPTS[1], max_new_tokens=12, do_sample=True, temperature=0.8)
    assert answer.choices[0].text == wanted


@pytest.mark.parametrize("is_streamed", [False, True])
@pytest.mark.parametrize(
    "options",
    [
        {"temperature": 0.7, "seed": 5, "top_p": 0.9},
        {"temperature": 0, "logit_bias": {"70": 4}, "extra_body": {"repetition_penalty": 1.3}},
    ],
    ids=["sampled", "with penalties"],
)
def test_log_probabilities_are_those_before_temperature_and_filters(
    client: openai.OpenAI, target: Any, chat_tokenizer: Any, options: dict[str, Any], is_streamed: bool
) -> None:
    """And after penalties and bias."""
    kwargs: dict[str, Any] = {"do_sample": True, "temperature": 0.7, "top_p": 0.9}
    if "logit_bias" in options:
        kwargs = {"do_sample": False, "sequence_bias": [[[70], 4.0]], "repetition_penalty": 1.3}
    ids = chat_tokenizer(CHAT_PROMPT, return_tensors="pt").input_ids
    torch.manual_seed(5)
    kwargs |= {"max_new_tokens": 12, "return_dict_in_generate": True, "output_logits": True, "output_scores": True}
    output = plain(target, ids, **kwargs)
    rows = output.logits if kwargs["do_sample"] else output.scores
    tokens, logprobs = output.sequences[0, ids.shape[1] :].tolist(), torch.cat(rows).log_softmax(dim=-1)
    options = {"model": NAME, "max_tokens": 12, "logprobs": True, "top_logprobs": 3, "stream": is_streamed, **options}
    answer: Any = client.chat.completions.create(messages=MESSAGES, **options)
    columns = [event.choices[0].logprobs for event in (answer if is_streamed else [answer])]
    entries = [entry for column in columns if column for entry in column.content]
    assert b"".join(bytes(entry.bytes) for entry in entries).decode() == chat_tokenizer.decode(tokens)
    for entry, token, row in zip(entries, tokens, logprobs, strict=True):
        assert (entry.token, entry.logprob) == (
            chat_tokenizer.decode([token]),
            pytest.approx(float(row[token]), abs=1e-4),
        )
        best = row.topk(3)
        assert [top.token for top in entry.top_logprobs] == [chat_tokenizer.decode([token]) for token in best.indices]
        assert [top.logprob for top in entry.top_logprobs] == pytest.approx(best.values.tolist(), abs=1e-4)


@pytest.mark.parametrize("is_shared", [False, True])
def test_requests_learn_from_others_and_share_prefixes_where_that_is_wanted(
    target: Any, chat_tokenizer: Any, is_shared: bool
) -> None:
    """Else drafts come from the request alone, and keys and values from requests of the same API key."""
    system = {"role": "system", "content": "Answer in few words. " * 10}
    answers, method = [], {"spec_method": "prompt_lookup", "spec_config": PromptLookupConfig(pool="shared")}
    with serving(target, chat_tokenizer, api_keys=("ann", "bob"), shares_texts=is_shared, **method) as url:
        for key in ("ann", "ann", "bob"):
            with openai.OpenAI(base_url=url, api_key=key, max_retries=0) as client:
                options: dict[str, Any] = {"model": NAME, "messages": [system, *MESSAGES], "temperature": 0}
                answers.append(client.chat.completions.create(**options))
    assert len({answer.choices[0].message.content for answer in answers}) == 1
    cached: Any = [answer.usage.prompt_tokens_details.cached_tokens for answer in answers]  # type: ignore[union-attr]
    assert (cached[0], cached[1] > 40, cached[2] > 40) == (0, True, is_shared)
    first, _, other = (spec_stats(answer)["num_drafts"] for answer in answers)
    assert other < 0.6 * first if is_shared else other == first


def streaming(client: openai.OpenAI, prompt: str) -> openai.Stream[Any]:
    """A long answer that has a place in the batch: its first token is here."""
    options: dict[str, Any] = {"model": NAME, "prompt": prompt, "max_tokens": 1500, "temperature": 0}
    events: openai.Stream[Any] = client.completions.create(**options, stream=True)
    next(events), next(events)  # the first event comes before any token
    return events


def test_more_requests_than_may_wait_are_refused(target: Any, chat_tokenizer: Any) -> None:
    """Four are decoded and one waits; the sixth is told to come back. Clients that hang up free their places."""
    with connected(target, chat_tokenizer, max_queue=1) as client:
        streams = [streaming(client, prompt) for prompt in PROMPTS[:4]]
        waiting = client.completions.create(model=NAME, prompt=PROMPTS[4], max_tokens=4, stream=True)
        with pytest.raises(openai.RateLimitError, match="max_queue is 1") as raised:
            client.completions.create(**GREEDY)
        assert raised.value.response.headers["retry-after"] == "1"
        for events in streams:
            events.close()
        assert list(waiting)[-1].choices[0].finish_reason
        assert client.completions.create(**GREEDY).choices[0].text == expected(target, chat_tokenizer, PROMPTS[0])


def test_a_forward_that_fails_ends_its_requests_alone(
    target: Any, chat_tokenizer: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """Texts that shared the forward end with an error; what comes after is served."""

    def fail(module: Any, args: Any, kwargs: Any) -> None:
        hook.remove()
        raise RuntimeError("CUDA out of memory")

    with connected(target, chat_tokenizer) as client:
        streams = [streaming(client, prompt) for prompt in PROMPTS[:2]]
        hook = target.register_forward_pre_hook(fail, with_kwargs=True)
        for events in streams:
            with pytest.raises(openai.APIError, match="RuntimeError in the server"):
                list(events)
        assert client.completions.create(**GREEDY).choices[0].text == expected(target, chat_tokenizer, PROMPTS[0])
    assert "CUDA out of memory" in caplog.text


def test_a_draft_head_drafts_for_all_requests(target: Any, chat_tokenizer: Any) -> None:
    with connected(target, chat_tokenizer, assistant_model=random_head(target), spec_method="eagle3") as client:
        answer = client.completions.create(**GREEDY)
        assert answer.choices[0].text == expected(target, chat_tokenizer, PROMPTS[0])
        assert (spec_stats(answer)["method"], spec_stats(answer)["plain_reason"]) == ("eagle3", None)
