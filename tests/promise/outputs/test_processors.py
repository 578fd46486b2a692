"""Logits processors are called once per emitted token, in order, with the ids of the true prefix."""

from typing import Any

import pytest
import torch
from transformers import LogitsProcessor, LogitsProcessorList

from tests.helpers.support import PROMPT, assert_same_run, assert_same_tensors, both
from tests.helpers.zoo import VOCAB_SIZE
from tests.promise.conftest import Draft


class Recorder(LogitsProcessor):
    """Remembers what it was shown."""

    def __init__(self) -> None:
        self.texts: list[list[int]] = []
        self.shown: list[torch.Tensor] = []

    def __call__(self, input_ids: torch.LongTensor, scores: torch.FloatTensor) -> torch.FloatTensor:
        self.texts.append(input_ids[0].tolist())
        self.shown.append(scores.clone())
        return scores


class Alternating(LogitsProcessor):
    """Stateful: forbids even tokens on every second call, whatever the text."""

    def __init__(self) -> None:
        self.num_calls = 0

    def __call__(self, input_ids: torch.LongTensor, scores: torch.FloatTensor) -> torch.FloatTensor:
        self.num_calls += 1
        if self.num_calls % 2:
            scores[:, ::2] = -float("inf")  # in place, as many processors do
        return scores


class Noise(LogitsProcessor):
    """Draws from the global random generator on each call."""

    def __call__(self, input_ids: torch.LongTensor, scores: torch.FloatTensor) -> torch.FloatTensor:
        return scores + 2 * torch.rand_like(scores)


@pytest.mark.parametrize("do_sample", [False, True])
def test_a_processor_sees_what_plain_decoding_shows_it(model: Any, draft: Draft, do_sample: bool) -> None:
    """The same texts in the same order, and the same scores up to rounding."""
    reference, ours = both(
        model, lambda: {"logits_processor": LogitsProcessorList([Recorder()]), "do_sample": do_sample}, draft
    )
    assert_same_run(ours, reference)
    expected, seen = reference.kwargs["logits_processor"][0], ours.kwargs["logits_processor"][0]
    assert seen.texts == expected.texts
    assert [text[30:] for text in seen.texts] == [ours.ids[30:][:n] for n in range(16)]
    assert_same_tensors(tuple(seen.shown), tuple(expected.shown))


@pytest.mark.parametrize("do_sample", [False, True])
@pytest.mark.parametrize("processor", [Alternating, Noise])
def test_stateful_processors_work(model: Any, draft: Draft, processor: type, do_sample: bool) -> None:
    reference, ours = both(
        model, lambda: {"logits_processor": LogitsProcessorList([processor()]), "do_sample": do_sample}, draft
    )
    assert_same_run(ours, reference)


def only_above_the_last(batch: int, ids: torch.Tensor) -> list[int]:
    """A constraint that depends on the prefix: tokens of the other parity than the last one."""
    return list(range(1 - int(ids[-1]) % 2, VOCAB_SIZE, 2))


SETTINGS: dict[str, dict[str, Any]] = {
    "prefix_allowed_tokens_fn": {"prefix_allowed_tokens_fn": only_above_the_last},
    "sequence_bias": {"sequence_bias": [[[23], 3.0], [[83, 23], -10.0]]},
    "bad_words_ids": {"bad_words_ids": [[23], [84, 112]]},
    "no_repeat_ngram_size": {"no_repeat_ngram_size": 2},
    "suppress_tokens": {"suppress_tokens": [23, 89]},
    "begin_suppress_tokens": {"begin_suppress_tokens": [105, 123]},
    "forced_eos_token_id": {"forced_eos_token_id": 2},
    "exponential_decay": {"exponential_decay_length_penalty": (4, 1.5), "eos_token_id": 2},
    "encoder_repetition_penalty": {"encoder_repetition_penalty": 1.4},
    "guidance_scale": {"guidance_scale": 1.5},
    "negative_prompt": {"guidance_scale": 2.0, "negative_prompt_ids": PROMPT[:, :12]},
    "min_p": {"do_sample": True, "min_p": 0.02},
    "typical_p": {"do_sample": True, "typical_p": 0.6},
    "epsilon_and_eta": {"do_sample": True, "epsilon_cutoff": 0.002, "eta_cutoff": 0.002},
    "temperature": {"do_sample": True, "temperature": 0.3},
    "top_h": {"do_sample": True, "top_h": 0.4},
    "renormalize": {"do_sample": True, "top_k": 5, "renormalize_logits": True},
    "watermarking_config": {"watermarking_config": {"bias": 2.5, "seeding_scheme": "selfhash"}},
    "remove_invalid_values": {"remove_invalid_values": True},
    "repetition_and_ngrams": {"do_sample": True, "repetition_penalty": 1.2, "no_repeat_ngram_size": 3},
}


@pytest.mark.at_most(8)
@pytest.mark.parametrize("setting", SETTINGS)
def test_each_processing_setting_gives_the_same_text(model: Any, draft: Draft, setting: str) -> None:
    """All that `generate` builds processors from."""
    reference, ours = both(model, lambda: dict(SETTINGS[setting]), draft)
    assert_same_run(ours, reference)
