"""Processors and criteria that treat each row by itself work in speculative batches, as in plain ones."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers import LogitsProcessor, StoppingCriteria

import hf_specdec
from tests.helpers.support import MASK, METHODS, PADDED, method_of, noisy_copy, plain, results_of
from tests.helpers.zoo import VOCAB_SIZE

OPTIONS: dict[str, Any] = {"max_new_tokens": 12, "do_sample": False, "attention_mask": MASK}


class Alternating(LogitsProcessor):
    """Stateful: forbids tokens of one parity on every second call, beginning by its row."""

    def __init__(self, row: int) -> None:
        self.num_calls = row

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        assert len(input_ids) == len(scores) == 1
        self.num_calls += 1
        return scores.index_fill(1, torch.arange(self.num_calls % 2, VOCAB_SIZE, 2), -float("inf"))


class Odd(LogitsProcessor):
    """Keeps nothing: only tokens of the other parity than the last one."""

    row_safe = True

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        parity = torch.arange(scores.shape[1]) % 2
        return scores.masked_fill(parity[None] == input_ids[:, -1:] % 2, -float("inf"))


class Undeclared(Odd):
    row_safe = False


class AfterCalls(StoppingCriteria):
    """Ends its row at the call of a given number."""

    def __init__(self, row: int) -> None:
        self.left = 3 + 2 * row

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        assert len(input_ids) == 1
        self.left -= 1
        return torch.tensor([self.left <= 0])


class AtMultiple(StoppingCriteria):
    row_safe = True

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        return input_ids[:, -1] % 4 == 0


class AtMultipleUndeclared(AtMultiple):
    row_safe = False


def only_own_tokens(row: int, ids: torch.Tensor) -> list[int]:
    """A constraint that depends on the row and on the prefix."""
    return list(range((row + int(ids[-1])) % 3, VOCAB_SIZE, 3))


# Made anew for each call: grammars and counters serve one.
SETTINGS: dict[str, Callable[[], dict[str, Any]]] = {
    "watermark": lambda: {"watermarking_config": {"bias": 2.5, "seeding_scheme": "lefthash"}},
    "stateful processors": lambda: {"logits_processor": [hf_specdec.PerRow(Alternating)]},
    "declared processor": lambda: {"logits_processor": [Odd()]},
    "stateful criteria": lambda: {"stopping_criteria": [hf_specdec.PerRow(AfterCalls)], "eos_token_id": 1},
    "declared criterion": lambda: {"stopping_criteria": [AtMultiple()], "eos_token_id": 1},
}


@pytest.fixture(scope="module")
def pair(zoo: Callable[[str], Any]) -> tuple[Any, Any]:
    model = zoo("llama")
    return model, noisy_copy(model)


@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("method", METHODS)
def test_each_row_is_processed_as_in_plain_decoding(pair: tuple[Any, Any], method: str, setting: str) -> None:
    model, draft = pair
    make = SETTINGS[setting]
    expected = plain(model, PADDED, **OPTIONS, **make())
    output = model.generate(PADDED, **OPTIONS, **make(), **method_of(method, draft), return_dict_in_generate=True)
    assert output.spec_stats.plain_reason is None
    assert output.sequences.tolist() == expected.tolist()


@pytest.mark.parametrize(
    ("inputs", "remedy"),
    [
        ({"logits_processor": [Undeclared()]}, "row_safe"),
        ({"stopping_criteria": [AtMultipleUndeclared()], "eos_token_id": 1}, "row_safe"),
        ({"guidance_scale": 1.5}, "generate one prompt at a time"),
        ({"prefix_allowed_tokens_fn": only_own_tokens}, "generate one prompt at a time"),
        ({"encoder_repetition_penalty": 1.6}, "generate one prompt at a time"),
    ],
    ids=["processor", "criterion", "guidance", "prefixes", "encoder"],
)
def test_what_may_look_at_all_rows_gets_them_in_step(
    pair: tuple[Any, Any], inputs: dict[str, Any], remedy: str
) -> None:
    """The batch is decoded plainly, and the reason says what to do."""
    model, _ = pair
    output = model.generate(PADDED, **OPTIONS, **inputs, spec_method="prompt_lookup", return_dict_in_generate=True)
    assert "may look at several sequences at once" in output.spec_stats.plain_reason
    assert remedy in output.spec_stats.plain_reason
    assert output.sequences.tolist() == plain(model, PADDED, **OPTIONS, **inputs).tolist()


def test_a_criterion_that_ends_rows_needs_an_end_of_text_token(pair: tuple[Any, Any]) -> None:
    """Without one there is no padding, and plain decoding ends all rows together."""
    output = pair[0].generate(
        PADDED, **OPTIONS, stopping_criteria=[AtMultiple()], spec_method="prompt_lookup", return_dict_in_generate=True
    )
    assert "no sequence ends before the others" in output.spec_stats.plain_reason


def test_each_of_many_prompts_has_its_own(pair: tuple[Any, Any]) -> None:
    model, _ = pair
    prompts = [PADDED[:1, 9:], PADDED[1:2, 9:], PADDED[2:, 9:]] * 2
    results = results_of(
        model,
        prompts,
        max_batch_size=2,
        max_new_tokens=10,
        logits_processor=[hf_specdec.PerRow(Alternating)],
        stopping_criteria=[hf_specdec.PerRow(AfterCalls)],
    )
    for result in results:
        assert result.error is None
        alone = plain(
            model,
            prompts[result.index],
            max_new_tokens=10,
            logits_processor=[Alternating(result.index)],
            stopping_criteria=[AfterCalls(result.index)],
        )
        assert result.token_ids == alone[0, prompts[result.index].shape[1] :].tolist()


def test_a_row_s_maker_must_be_callable() -> None:
    with pytest.raises(hf_specdec.ConfigError, match="make"):
        hf_specdec.PerRow([Odd()])  # type: ignore[arg-type]
