"""Every way gets the same prompts, and what it writes is counted without padding."""

import copy
from typing import Any

import pytest
import torch

import hf_specdec
from hf_specdec.errors import ConfigError
from hf_specdec.tools.summarize.articles import Article, read_articles
from hf_specdec.tools.summarize.run import Summaries, Summarizer, summarize_all

OPTIONS: dict[str, Any] = {"max_new_tokens": 12, "do_sample": False}
WAYS: dict[str, dict[str, Any]] = {"plain": {}, "prompt_lookup": {"spec_method": "prompt_lookup"}}
ARTICLES = [Article(" ".join(article.text.split()[:30]), article.reference) for article in read_articles(None, limit=3)]


@pytest.fixture(scope="module")
def target() -> Any:
    return hf_specdec.AutoModelForCausalLM.from_pretrained(hf_specdec.embedded.path("target"), precision="fp32")


def test_both_ways_write_the_same_alone_and_in_batches(target: Any, tokenizer: Any) -> None:
    alone = summarize_all(Summarizer(target, tokenizer, OPTIONS), ARTICLES, WAYS)
    together = summarize_all(Summarizer(target, tokenizer, OPTIONS, batch_size=2), ARTICLES, WAYS)
    for written in (alone, together):
        assert written["prompt_lookup"].token_ids == written["plain"].token_ids
        assert written["prompt_lookup"].num_equal(written["plain"]) == 3
    assert together["plain"].token_ids == alone["plain"].token_ids
    assert alone["plain"].num_tokens == 36
    assert alone["plain"].tokens_per_second == 36 / alone["plain"].seconds


@pytest.mark.wide
def test_batches_need_no_padding_token(target: Any, tokenizer: Any) -> None:
    """Llama's, Mistral's and GPT-2's tokenizers have none."""
    wanted = summarize_all(Summarizer(target, tokenizer, OPTIONS), ARTICLES, WAYS)
    unpadded = copy.deepcopy(tokenizer)
    unpadded.pad_token = None
    found = summarize_all(Summarizer(target, unpadded, OPTIONS, batch_size=3), ARTICLES, WAYS)
    assert {name: summaries.token_ids for name, summaries in found.items()} == {
        name: summaries.token_ids for name, summaries in wanted.items()
    }


@pytest.mark.wide
def test_summaries_end_with_the_end_of_text(target: Any, tokenizer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows that end early are padded by `generate`; the padding is no part of the summary."""
    free = summarize_all(Summarizer(target, tokenizer, OPTIONS), ARTICLES, {"plain": {}})["plain"].token_ids
    monkeypatch.setattr(target.generation_config, "eos_token_id", [free[0][3], free[1][5]])
    ends = {free[0][3], free[1][5]}
    written = summarize_all(Summarizer(target, tokenizer, OPTIONS, batch_size=3), ARTICLES, WAYS)
    for summaries in written.values():
        for got, whole in zip(summaries.token_ids, free, strict=True):
            length = next((place + 1 for place, token in enumerate(whole) if token in ends), 12)
            assert got == whole[:length]


def test_a_long_article_is_cut_and_the_request_is_not(target: Any, tokenizer: Any) -> None:
    prompt = Summarizer(target, tokenizer, max_input_tokens=10).prompt(ARTICLES[0])
    assert prompt.endswith("\n\nTL;DR:")
    cut = prompt.removesuffix("\n\nTL;DR:")
    assert ARTICLES[0].text.startswith(cut) and 0 < len(cut) < len(ARTICLES[0].text)


def test_the_prompt_follows_the_template(target: Any, tokenizer: Any) -> None:
    assert Summarizer(target, tokenizer, template="<{article}>").prompt(Article("Text.", "T.")) == "<Text.>"
    for wrong in ("no place for the text", "{article} \udc80"):
        with pytest.raises(ConfigError, match="prompt-template"):
            Summarizer(target, tokenizer, template=wrong)


def test_a_tokenizer_with_a_chat_template_is_asked_in_a_chat(
    target: Any, tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    template = "{% for m in messages %}[{{ m['role'] }}] {{ m['content'] }}{% endfor %}[assistant]"
    monkeypatch.setattr(tokenizer, "chat_template", template)
    prompt = Summarizer(target, tokenizer).prompt(Article("Text.", "T."))
    assert prompt == "[user] Summarize the following article in a few sentences.\n\nText.[assistant]"


def test_a_chat_is_asked_as_it_is(target: Any, tokenizer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    chat = Article("Shorten it.", "S.", ({"role": "system", "content": "Be brief."},), is_chat=True)
    assert Summarizer(target, tokenizer, template="<{article}>").prompt(chat) == "Be brief.\n\nShorten it."
    template = "{% for m in messages %}[{{ m['role'] }}] {{ m['content'] }}{% endfor %}[assistant]"
    monkeypatch.setattr(tokenizer, "chat_template", template)
    assert Summarizer(target, tokenizer).prompt(chat) == "[system] Be brief.[user] Shorten it.[assistant]"


@pytest.mark.wide
def test_a_seed_makes_samples_the_same(target: Any, tokenizer: Any) -> None:
    options = {**OPTIONS, "do_sample": True, "top_k": 0}
    written = summarize_all(Summarizer(target, tokenizer, options, seed=3), ARTICLES, WAYS)
    assert written["prompt_lookup"].token_ids == written["plain"].token_ids


def test_the_warm_up_leaves_no_memory(target: Any, tokenizer: Any) -> None:
    """Else a method with a memory would draft the first batch from its own answers."""
    steps: list[Any] = []
    way = {"spec_method": "auto", "auto_config": {"num_nodes": 8}, "spec_observer": steps.append}
    summarize_all(Summarizer(target, tokenizer, OPTIONS), ARTICLES[:1], {"auto": way})
    half = len(steps) // 2
    assert half > 0 and len(steps) == 2 * half
    assert [step.accepted for step in steps[:half]] == [step.accepted for step in steps[half:]]


def test_an_interrupt_leaves_what_every_way_has_summarised(
    target: Any, tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the time of that alone."""
    seconds: list[float] = []
    real = Summarizer.write

    def write(self: Summarizer, articles: Any, into: Summaries, how: Any) -> None:
        real(self, articles, into, how)
        seconds.append(into.seconds)
        if len(seconds) == 2 + 2 + 1:  # of two ways: the warm-up, the first article, the second by one way
            raise KeyboardInterrupt

    monkeypatch.setattr(Summarizer, "write", write)
    written = summarize_all(Summarizer(target, tokenizer, OPTIONS), ARTICLES, WAYS)
    assert [len(found.token_ids) for found in written.values()] == [1, 1]
    assert [len(found.texts) for found in written.values()] == [1, 1]
    assert [found.seconds for found in written.values()] == seconds[2:4]
    with pytest.raises(KeyboardInterrupt):
        seconds[:] = [0.0] * 4
        summarize_all(Summarizer(target, tokenizer, OPTIONS), ARTICLES, WAYS)


@pytest.mark.parametrize("most", [5, 7, 50, 100])
def test_text_cut_within_a_character_has_no_more_tokens_than_asked_for(
    target: Any, tokenizer: Any, monkeypatch: pytest.MonkeyPatch, most: int
) -> None:
    """The rest of a character would be decoded to a sign of several tokens."""
    article = Article("\u65e5\u672c\u8a9e\u306e\u8a18\u4e8b\U0001f389\u3067\u3059\u3002" * 30, "")
    cut = Summarizer(target, tokenizer, max_input_tokens=most).prompt(article).removesuffix("\n\nTL;DR:")
    assert cut and article.text.startswith(cut)
    assert len(tokenizer(cut).input_ids) <= most
    for positions in range(50, 60):
        monkeypatch.setattr(target.config, "max_position_embeddings", positions)
        prompt = Summarizer(target, tokenizer, OPTIONS).prompt(article)
        assert len(tokenizer(prompt).input_ids) + OPTIONS["max_new_tokens"] <= positions


def test_summaries_without_an_article_are_none() -> None:
    assert Summaries().num_tokens == 0


def test_the_tokenizer_is_left_as_it_was(target: Any, tokenizer: Any) -> None:
    side = tokenizer.padding_side
    Summarizer(target, tokenizer, OPTIONS).write(ARTICLES[:2], Summaries(), {})
    assert tokenizer.padding_side == side
    assert torch.is_grad_enabled()


def test_an_article_is_cut_to_the_model_s_positions(
    target: Any, tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Request and summary have room next to it."""
    monkeypatch.setattr(target.config, "max_position_embeddings", 40)
    summarizer = Summarizer(target, tokenizer, OPTIONS)
    length = len(tokenizer(summarizer.prompt(ARTICLES[0])).input_ids)
    assert 25 <= length <= 40 - OPTIONS["max_new_tokens"]
    short = Article("x", "y")
    assert summarizer.prompt(short).startswith("x\n")
    with pytest.raises(ConfigError, match="`--max-new-tokens` must leave room for an article within the model's 40"):
        Summarizer(target, tokenizer, {"max_new_tokens": 38}).prompt(short)
