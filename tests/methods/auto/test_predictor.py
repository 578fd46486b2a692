"""The predictor: one probability a candidate, from all sources, corrected by every token of the text."""

import numpy as np
import pytest
import torch

from hf_specdec.methods.auto.predictor import MOST_TRUST, Prediction, Predictor
from hf_specdec.methods.auto.recycled_logits import Entry, log_odds
from hf_specdec.methods.auto.spec_memory import SpecMemory
from hf_specdec.methods.common.ngram.index import NgramIndex

LIKELY: Entry = ((30, 31), (12.0, 5.0))


def ask(predictor: Predictor, tokens: list[int], drafted: Entry | None = None) -> Prediction:
    index = NgramIndex(4)
    index.extend(tokens)
    return predictor.predict(predictor.text_of(index), drafted)


def by_token(prediction: Prediction) -> dict[int, float]:
    return dict(zip(prediction.tokens, prediction.probabilities, strict=True))


@pytest.fixture
def memory() -> SpecMemory:
    return SpecMemory(1_000, 1_000)


@pytest.fixture
def predictor(memory: SpecMemory) -> Predictor:
    return Predictor(memory, is_sampled=False)


@pytest.mark.parametrize("seed", range(5))
def test_probabilities_are_at_most_one_together(seed: int, memory: SpecMemory, predictor: Predictor) -> None:
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(5, (60,), generator=generator).tolist()
    memory.pool.add(tokens[::-1])
    memory.recycled.put(tuple(tokens[-3:]), (tuple(range(8)), (14.0,) * 8))
    prediction = ask(predictor, tokens, (tuple(range(8)), (14.0,) * 8))
    assert len(prediction.tokens) == 8
    assert sum(prediction.probabilities) <= 1.0 + 1e-9
    assert all(0.0 < probability < 1.0 for probability in prediction.probabilities)


def test_every_source_names_candidates(memory: SpecMemory, predictor: Predictor) -> None:
    memory.pool.add([6, 7, 20])
    memory.recycled.put((5, 6, 7), LIKELY)
    prediction = ask(predictor, [6, 7, 10, 6, 7], ((40,), (13.0,)))
    assert by_token(prediction).keys() == {10, 20, 30, 31, 40}


def test_before_anything_is_learned_a_greedy_target_is_expected_to_be_surer_than_its_draft(memory: SpecMemory) -> None:
    """Likely tokens are accepted more often than the draft says, unlikely ones less; drawn ones as often as it says."""
    shares = np.array([0.7, 0.05])
    greedy, sampled = (
        by_token(ask(Predictor(memory, is_sampled=drawn), [1, 2, 3], ((40, 41), log_odds(shares).tolist())))
        for drawn in (False, True)
    )
    assert greedy[40] > shares[0] + 0.1
    assert greedy[41] < shares[1] / 2
    assert [sampled[40], sampled[41]] == pytest.approx(shares, abs=0.05)


def test_without_a_pool_or_recycled_logits_the_text_alone_speaks(memory: SpecMemory) -> None:
    memory.pool.add([6, 7, 20])
    memory.recycled.put((7,), LIKELY)
    predictor = Predictor(memory, is_sampled=False, uses_texts=False, uses_recycled=False)
    found = by_token(ask(predictor, [6, 7, 10, 6, 7]))
    assert found.keys() == {6, 7, 10}
    assert found[10] == max(found.values())


def test_common_tokens_stand_in_only_where_nothing_is_recycled(memory: SpecMemory, predictor: Predictor) -> None:
    tokens = [4, 5, 6, 5, 7, 5, 8, 5, 9]
    assert 5 in by_token(ask(predictor, tokens))
    memory.recycled.put((9,), LIKELY)
    assert by_token(ask(predictor, tokens)).keys() == {30, 31}


def test_what_follows_a_longer_match_is_likelier(predictor: Predictor) -> None:
    found = by_token(ask(predictor, [1, 2, 3, 4, 50, 9, 4, 60, 1, 2, 3, 4]))
    assert found[50] > 2 * found[60]


def test_likelier_recycled_tokens_are_likelier(memory: SpecMemory, predictor: Predictor) -> None:
    memory.recycled.put((5, 6, 7), LIKELY)
    found = by_token(ask(predictor, [5, 6, 7]))
    assert found[30] > 5 * found[31]


def test_a_draft_model_is_believed_more_than_what_is_recycled(memory: SpecMemory, predictor: Predictor) -> None:
    memory.recycled.put((5, 6, 7), LIKELY)
    found = by_token(ask(predictor, [5, 6, 7], ((40,), (12.0,))))
    assert found[40] > found[30]


@pytest.mark.parametrize(("token", "rises"), [(30, True), (99, False)])
def test_it_learns_from_what_comes_drafted_or_not(
    token: int, rises: bool, memory: SpecMemory, predictor: Predictor
) -> None:
    memory.recycled.put((5, 6, 7), LIKELY)
    before = by_token(ask(predictor, [5, 6, 7]))[30]
    for _ in range(60):
        predictor.learn(ask(predictor, [5, 6, 7]), token, [])
    assert (by_token(ask(predictor, [5, 6, 7]))[30] > before) == rises
    assert memory.greedy.calibration.counts() == ([0.0] * 20, [0.0] * 20)


def test_only_verified_candidates_are_counted_for_the_correction(memory: SpecMemory, predictor: Predictor) -> None:
    memory.recycled.put((5, 6, 7), LIKELY)
    prediction = ask(predictor, [5, 6, 7])
    predictor.learn(prediction, 30, [30])
    expected, accepted = memory.greedy.calibration.counts()
    assert sum(expected) == pytest.approx(prediction.raw[prediction.tokens.index(30)])
    assert sum(accepted) == 1.0


def test_greedy_and_sampled_texts_teach_apart(memory: SpecMemory) -> None:
    memory.recycled.put((5, 6, 7), LIKELY)
    sampled = Predictor(memory, is_sampled=True)
    sampled.learn(ask(sampled, [5, 6, 7]), 99, [30])
    assert sum(memory.sampled.mixer.seen) == 1
    assert sum(memory.greedy.mixer.seen) == 0


def test_nothing_known_is_no_candidate(predictor: Predictor) -> None:
    prediction = ask(predictor, [5])
    assert prediction.tokens == prediction.probabilities == []
    predictor.learn(prediction, 4, [])


def test_a_text_unlike_the_others_is_trusted_less(memory: SpecMemory) -> None:
    """Of one text alone: another that begins afterwards starts with full trust."""
    memory.recycled.put((5, 6, 7), LIKELY)
    predictor = Predictor(memory, is_sampled=True)
    before = by_token(ask(predictor, [5, 6, 7]))[30]
    for _ in range(5):
        predictor.learn(ask(predictor, [5, 6, 7]), 99, [30])
    assert predictor.trust < 0.8
    assert by_token(ask(predictor, [5, 6, 7]))[30] < 0.5 * before
    assert Predictor(memory, is_sampled=True).trust == 1.0
    for _ in range(100):
        predictor.learn(ask(predictor, [5, 6, 7]), 30, [30])
    assert predictor.trust > 0.9


def test_a_text_that_keeps_more_than_it_promised_is_trusted_more(memory: SpecMemory) -> None:
    memory.recycled.put((5, 6, 7), LIKELY)
    predictor = Predictor(memory, is_sampled=True)
    trusts = []
    for _ in range(30):
        predictor.learn(ask(predictor, [5, 6, 7]), 31, [31])  # the one held unlikely
        trusts.append(predictor.trust)
    assert 1.1 < max(trusts) <= MOST_TRUST
    assert sum(ask(predictor, [5, 6, 7]).probabilities) <= 1.0 + 1e-9
