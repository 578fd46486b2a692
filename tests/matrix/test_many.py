"""`generate_many`: each result is plain `generate` of its prompt alone, in whatever order and company."""

import random
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

import hf_specdec
from tests.helpers.cover import wide_but
from tests.helpers.support import plain
from tests.helpers.zoo import FALLBACK, FAMILIES

SEED, NEW_TOKENS = 11, 20
METHODS: dict[str, dict[str, Any]] = {
    "prompt_lookup": {"spec_method": "prompt_lookup"},
    "lookahead": {"spec_method": "lookahead", "spec_config": [4, 3, 5]},
    "auto": {"spec_method": "auto"},
    "auto, 9 nodes": {"spec_method": "auto", "spec_config": {"num_nodes": 9}},
    "draft_model": {"spec_method": "draft_model", "spec_config": {"confidence_threshold": 0.0}},
}
SOME = ("llama", "gemma3", "qwen3_next", "t5", "recurrent_gemma")
MODES: dict[str, dict[str, Any]] = {
    "greedy": {"do_sample": False},
    "sampled": {"do_sample": True, "temperature": 0.8, "repetition_penalty": 1.2},
}


def make_prompts(count: int = 10) -> list[list[int]]:
    """Of 6 to 55 tokens; every third begins with the same 20."""
    rng = random.Random(0)
    common = [rng.randrange(3, 128) for _ in range(20)]
    prompts = []
    for number in range(count):
        ours = [rng.randrange(3, 128) for _ in range(rng.randrange(1, 30))]
        prompts.append((common if number % 3 == 0 else []) + ours + ours[:5])
    return prompts


PROMPTS = make_prompts()


class Alone:
    """What plain `generate` makes of each prompt alone."""

    def __init__(self, model: Any, draft: Any, mode: str) -> None:
        self.model, self.draft = model, draft
        self.options = {"max_new_tokens": NEW_TOKENS, "eos_token_id": [17, 33, 60], **MODES[mode]}
        self.texts = [self._text(index, prompt) for index, prompt in enumerate(PROMPTS)]

    def _text(self, index: int, prompt: list[int]) -> list[int]:
        torch.manual_seed(SEED + index)
        start = 1 if self.model.config.is_encoder_decoder else len(prompt)
        tokens: list[int] = plain(self.model, torch.tensor([prompt]), **self.options)[0, start:].tolist()
        return tokens

    def many(self, method: str, prompts: Any = PROMPTS, **options: Any) -> Iterator[hf_specdec.ManyResult]:
        chosen = dict(METHODS[method])
        if method == "draft_model":
            chosen["assistant_model"] = self.draft
        seed = SEED if self.options["do_sample"] else None
        return hf_specdec.generate_many(self.model, prompts, **{"seed": seed, **self.options, **chosen, **options})


@pytest.fixture(scope="session")
def alone(zoo: Callable[[str], Any], draft_of: Callable[[str], Any]) -> Callable[[str, str], Alone]:
    seen: dict[tuple[str, str], Alone] = {}

    def texts(family: str, mode: str) -> Alone:
        if (family, mode) not in seen:
            seen[family, mode] = Alone(zoo(family), draft_of(family), mode)
        return seen[family, mode]

    return texts


@pytest.mark.at_most(1)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("family", wide_but(SOME, [*FAMILIES, *FALLBACK]))
def test_each_result_is_its_prompt_alone(
    alone: Callable[[str, str], Alone], family: str, method: str, mode: str
) -> None:
    reference = alone(family, mode)
    if method == "draft_model" and {**FAMILIES, **FALLBACK}[family].is_seq2seq:
        with pytest.raises(hf_specdec.ConfigError, match="no encoder of its own"):
            list(reference.many(method))
        return
    if method == "lookahead" and {**FAMILIES, **FALLBACK}[family].tier == "chain":
        with pytest.raises(hf_specdec.UnsupportedModelError, match="prompt_lookup"):
            list(reference.many(method))
        return
    results = list(reference.many(method, max_batch_size=4))
    assert sorted(result.index for result in results) == list(range(len(PROMPTS)))
    for result in results:
        assert result.error is None
        assert result.prompt == PROMPTS[result.index]
        assert result.token_ids == reference.texts[result.index]
        assert result.stats.num_tokens == len(result.token_ids)
        assert result.stats.method == METHODS[method]["spec_method"]
        assert result.seed == (SEED + result.index if mode == "sampled" else None)


@pytest.mark.at_most(1)
@pytest.mark.parametrize("size", [1, 2, 7, 50])
@pytest.mark.parametrize("mode", MODES)
def test_neither_the_batch_nor_the_order_matters(alone: Callable[[str, str], Alone], mode: str, size: int) -> None:
    reference = alone("llama", mode)
    results = reference.many("prompt_lookup", max_batch_size=size)
    assert {result.index: result.token_ids for result in results} == dict(enumerate(reference.texts))
    if mode == "greedy":
        backwards = reference.many("prompt_lookup", PROMPTS[::-1], max_batch_size=size)
        assert {result.index: result.token_ids for result in backwards} == dict(enumerate(reference.texts[::-1]))


def test_results_come_as_they_finish_and_prompts_are_read_as_rows_get_free(
    alone: Callable[[str, str], Alone],
) -> None:
    """A row that ends early does not wait for the longest one, nor does the next prompt."""
    reference, read = alone("llama", "greedy"), []

    def prompts() -> Iterator[list[int]]:
        for prompt in PROMPTS:
            read.append(prompt)
            yield prompt

    order = []
    for result in reference.many("prompt_lookup", prompts(), max_batch_size=3):
        order.append(result.index)
        assert len(read) <= len(order) + 3
    assert order != sorted(order)


@pytest.mark.parametrize(("bound", "most"), [(1, 1), (300, 2), (600, 4)])
def test_the_bound_on_the_cache_only_makes_batches_smaller(
    alone: Callable[[str, str], Alone], bound: int, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    from hf_specdec.forward.model_runner import ModelRunner

    widths: list[tuple[int, int]] = []
    forward = ModelRunner.forward

    def spying(self: ModelRunner, trees: Any) -> Any:
        widths.append((len(self.texts), max(len(text) for text in self.texts)))
        return forward(self, trees)

    reference = alone("llama", "greedy")
    list(reference.many("prompt_lookup", PROMPTS[:1]))  # the probes' forwards are none of the job's
    monkeypatch.setattr(ModelRunner, "forward", spying)
    results = list(reference.many("prompt_lookup", max_batch_size=6, max_cache_tokens=bound))
    assert {result.index: result.token_ids for result in results} == dict(enumerate(reference.texts))
    assert all(rows == 1 or rows * longest <= bound for rows, longest in widths)
    assert max(rows for rows, _ in widths) >= min(most, 2)
    assert max(rows for rows, _ in widths) <= most


@pytest.mark.parametrize("family", wide_but(["llama", "gemma3"], ["llama", "mistral", "gemma3", "deepseek_v3"]))
def test_a_shared_beginning_is_computed_once(alone: Callable[[str, str], Alone], family: str) -> None:
    """Its columns are copied, and the texts stay the same."""
    reference = alone(family, "greedy")
    results = list(reference.many("prompt_lookup", max_batch_size=len(PROMPTS)))
    assert {result.index: result.token_ids for result in results} == dict(enumerate(reference.texts))
    assert sum(result.stats.num_cached_tokens for result in results) >= 20 * 3


def test_a_bad_prompt_fails_alone(alone: Callable[[str, str], Alone]) -> None:
    reference = alone("llama", "greedy")
    prompts: list[Any] = list(PROMPTS)
    prompts[2], prompts[5], prompts[9] = [5, 999], [], [[1, 2], [3, 4]]
    wrong = {2: "tokens that the model embeds", 5: "", 9: "one sequence"}
    errors = {}
    for result in reference.many("prompt_lookup", prompts, max_batch_size=4):
        if result.error is not None:
            errors[result.index] = str(result.error)
        else:
            assert result.token_ids == reference.texts[result.index]
    assert errors.keys() == wrong.keys()
    assert all(wrong[index] in message for index, message in errors.items())


def test_a_processor_that_fails_on_one_text_ends_that_text_alone(alone: Callable[[str, str], Alone]) -> None:
    reference = alone("llama", "greedy")
    length = len(PROMPTS[6])

    def fragile(ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        if ids[0, :length].tolist() == PROMPTS[6] and ids.shape[1] == length + 5:
            raise RuntimeError("cannot read this")
        return scores

    results = list(reference.many("prompt_lookup", max_batch_size=4, logits_processor=[fragile]))
    failed = [result for result in results if result.error is not None]
    assert [result.index for result in failed] == [6]
    assert failed[0].token_ids == reference.texts[6][:5]
    assert all(r.token_ids == reference.texts[r.index] for r in results if r.error is None)


def test_a_setting_that_is_wrong_for_all_is_an_error(alone: Callable[[str, str], Alone]) -> None:
    reference = alone("llama", "greedy")
    with pytest.raises(hf_specdec.ConfigError, match="max_batch_size"):
        reference.many("prompt_lookup", max_batch_size=0)
    with pytest.raises(hf_specdec.ConfigError, match="num_return_sequences"):
        reference.many("prompt_lookup", num_return_sequences=2)
    with pytest.raises(hf_specdec.ConfigError, match="num_beams"):
        list(reference.many("prompt_lookup", num_beams=2))
    with pytest.raises(hf_specdec.ConfigError, match="tokenizer"):
        list(reference.many("prompt_lookup", ["a text"]))


def test_a_bar_changes_nothing_but_the_terminal(
    alone: Callable[[str, str], Alone], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    reference = alone("llama", "greedy")
    for is_terminal in (False, True):
        monkeypatch.setattr("rich.console.Console.is_terminal", is_terminal)
        results = reference.many("prompt_lookup", progress=True)
        assert {result.index: result.token_ids for result in results} == dict(enumerate(reference.texts))
        captured = capsys.readouterr()
        assert captured.out == ""
        assert ("100%" in captured.err) == is_terminal


def test_a_caller_who_stops_early_leaves_the_model_usable(alone: Callable[[str, str], Alone]) -> None:
    reference = alone("llama", "greedy")
    results = reference.many("prompt_lookup", max_batch_size=4)
    next(results)
    assert torch.is_grad_enabled(), "nothing of the generator's state leaks to the caller"
    results.close()  # type: ignore[attr-defined]
    again = {result.index: result.token_ids for result in reference.many("prompt_lookup")}
    assert again == dict(enumerate(reference.texts))
