"""What the next token may be, by everything that is known without a model: one probability a candidate.

Sources, from long contexts to short ones: where the context stood before in this text and in earlier ones, and the
target's recycled logits after the last three, two and one tokens; where there are none, the text's commonest tokens;
what lookahead's window found; and what a draft model says, where it has been asked. A `Mixer` blends them, a
`Calibration` corrects what it says by what was accepted. Both learn from every token of the text, drafted or not, so it
takes no trials to find out that a text cannot be drafted.
"""

import math
from array import array
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy.typing as npt

from hf_specdec.common.observer import SourceVote
from hf_specdec.methods.auto.adaptive_weights import AdaptiveWeights
from hf_specdec.methods.auto.matches import Matches, Votes
from hf_specdec.methods.auto.mixer import NoiseScores, softmax, weighted_sums
from hf_specdec.methods.auto.recycled_logits import (
    FLOOR,
    MAX_KEY,
    TOKEN_BITS,
    Entry,
    RecycledLogits,
    key_of,
)
from hf_specdec.methods.auto.spec_memory import SpecMemory
from hf_specdec.methods.common.ngram.index import NgramIndex

NoiseRow = npt.NDArray[Any]

OTHERS_NOISE, OTHERS_DRAFTED = 0.5, 2.0  # of all other tokens; where a draft named those of little noise. Measured
LEAST_NOISE = 1e-30
NEVER_DRAWN = -1e4  # score of a token that no draw can choose
NUM_COMMON = 16  # commonest tokens looked at
PRIOR_COUNT = 4.0  # accepted tokens as which an unknown text counts
MOST_TRUST = 1.3
FADE = 0.97  # of what was accepted and expected, a token
SMOOTHING_COUNT = 4.0  # votes that stand for tokens never seen after the context
OWN, POOLED, RECYCLED = 0, 1, 2  # places of the sources in a row of evidence
COMMON, DRAFT, FOUND = range(RECYCLED + MAX_KEY, RECYCLED + MAX_KEY + 3)
SOURCE_NAMES: Mapping[int, str] = {  # but for the draft's, which a call brings
    OWN: "text",
    POOLED: "earlier_texts",
    **{RECYCLED + place: "recycled_logits" for place in range(MAX_KEY)},
    COMMON: "text",
    FOUND: "window",
}


class Context(NamedTuple):
    """Where a prediction is asked for: the text and the drafted tokens after it.

    Attributes:
        tail (`tuple[int, ...]`): the last `MAX_KEY` tokens.
        matches: where they stood before.
    """

    tail: tuple[int, ...]
    matches: Matches

    def after(self, token: int) -> "Context":
        """The same with `token` after it."""
        return Context((*self.tail, token)[-MAX_KEY:], self.matches.after(token))


class Prediction(NamedTuple):
    """Candidates for the token after one context.

    Attributes:
        context: where.
        drafted: the draft model's entry that took part.
        tokens (`list[int]`): the candidates.
        raw (`list[float]`): the probability of each before the correction; with the noise of its draw, where that is
            known.
        probabilities (`list[float]`): its probability; together they are at most 1.
        kind (`int`): of the context, for the mixer.
        sources: what each source said, by its place in a row of evidence.
        weights: of the sources, by the same places.
        noise: of the draw, where that is known.
    """

    context: Context
    drafted: Entry | None
    tokens: list[int]
    raw: list[float]
    probabilities: list[float]
    kind: int
    sources: Sequence[tuple[int, Entry]]
    weights: Sequence[float]
    noise: NoiseScores | None = None

    @property
    def is_found(self) -> bool:
        """Whether a window took part."""
        return bool(self.sources) and self.sources[-1][0] == FOUND

    def share(self, token: int) -> float:
        """The probability of `token`, 0 where it is no candidate."""
        return self.probabilities[self.tokens.index(token)] if token in self.tokens else 0.0


class Predictor:
    """Predicts and learns for one text.

    Args:
        memory: recycled logits and what was learned about the sources, this text's alone or shared.
        is_sampled: whether tokens are drawn: other weights, since unlikely tokens come true more often.
        uses_texts, uses_recycled: whether earlier texts and recycled logits take part.
        draft_source: what the draft is called in votes.

    Attributes:
        found: what lookahead's window found for this text, if there is one.
    """

    found: RecycledLogits | None = None

    def __init__(
        self,
        memory: SpecMemory,
        *,
        is_sampled: bool,
        uses_texts: bool = True,
        uses_recycled: bool = True,
        draft_source: str = "draft_model",
    ) -> None:
        self.memory, self.uses_recycled = memory, uses_recycled
        self.source_names = {**SOURCE_NAMES, DRAFT: draft_source}
        self.pool = memory.pool if uses_texts else None
        self.adaptive_weights: AdaptiveWeights = memory.adaptive_weights(is_sampled)
        self._common: Entry = ([], [])
        self._record = array("d", [PRIOR_COUNT, PRIOR_COUNT])  # tokens of this text expected and accepted, faded

    @property
    def trust(self) -> float:
        """How far this text is as it was expected: accepted tokens over those expected, at most 1.3.

        What was learned from other texts says little of one that is drawn at another temperature.
        """
        expected, accepted = self._record
        return min(MOST_TRUST, (accepted + PRIOR_COUNT) / (expected + PRIOR_COUNT))

    @property
    def arrays(self) -> tuple[Any, ...]:
        """Earlier texts, recycled logits, what the window found and what was learned, as the compiled core takes them;
        `None` for what takes no part.
        """
        young, old = (None, None) if self.pool is None else [index.arrays for index in self.pool.indexes]
        recycled = self.memory.recycled.arrays if self.uses_recycled else None
        found = None if self.found is None else self.found.arrays
        adaptive_weights = self.adaptive_weights
        return (
            young,
            old,
            recycled,
            found,
            (*adaptive_weights.mixer.arrays, *adaptive_weights.calibration.arrays, self._record),
        )

    def common_of(self, index: NgramIndex) -> Entry:
        """The text's commonest tokens and the evidence for each: the last resort after unknown contexts."""
        shares = list(index.common.shares().items())[:NUM_COMMON]
        evidence = [max(0.0, FLOOR + math.log(share / (1.0 - share))) for _, share in shares]
        return [token for token, _ in shares], evidence

    def text_of(self, index: NgramIndex) -> Context:
        """The end of the text; asked once a step."""
        self._common = self.common_of(index)
        return Context(tuple(index.tokens[-MAX_KEY:]), Matches.of_text(index, self.pool))

    def predict(
        self,
        context: Context,
        drafted: Entry | None = None,
        noise: NoiseRow | None = None,
        *,
        uses_found: bool = True,
    ) -> Prediction:
        """Candidates after `context`.

        Args:
            drafted: a draft model's entry for it, if it was asked.
            noise: `(vocab_size,)` fp32 of the draw after it, if that is known; see `methods/common/draw_noise.py`.
            uses_found: whether a window takes part.
        """
        kind, sources = self._sources(context, drafted, uses_found)
        bias, *weights = self.adaptive_weights.mixer.weights_of(kind)
        sums = weighted_sums(sources, bias, *weights)
        corrected, trust = self.adaptive_weights.calibration.corrected, self.trust
        known = (
            None
            if noise is None
            else _noise_scores(list(sums), noise, OTHERS_NOISE if drafted is None else OTHERS_DRAFTED)
        )
        raw = softmax(sums.values(), known)
        probabilities = [corrected(probability) * trust for probability in raw]
        total = 0.0
        for probability in probabilities:  # one after the other, as the compiled core adds them
            total += probability
        if total > 1.0:
            probabilities = [probability / total for probability in probabilities]
        return Prediction(context, drafted, list(sums), raw, probabilities, kind, sources, weights, known)

    def votes(
        self, token: int, sources: Sequence[tuple[int, Entry]], weights: Sequence[float]
    ) -> tuple[SourceVote, ...]:
        """What each source that knows `token` said of it, the one that added most first."""
        votes = []
        for place, (tokens, evidence) in sources:
            if token in tokens:
                value = evidence[tokens.index(token)]
                probability = 1.0 / (1.0 + math.exp(FLOOR - value))
                votes.append(SourceVote(self.source_names[place], probability, weights[place] * value))
        return tuple(sorted(votes, key=lambda vote: -vote.weight))

    def learn(self, prediction: Prediction, token: int, drafted: Sequence[int]) -> None:
        """The token after the context was `token`; `drafted` are the candidates that were verified there."""
        self.adaptive_weights.mixer.learn(prediction.kind, prediction.sources, token, prediction.noise)
        if drafted:
            calibration = self.adaptive_weights.calibration
            places = {candidate: place for place, candidate in enumerate(prediction.tokens)}
            raw = [prediction.raw[places[one]] for one in drafted]
            expected = 0.0
            for probability in raw:
                expected += calibration.corrected(probability)
            self._record[0] = FADE * self._record[0] + expected
            self._record[1] = FADE * self._record[1] + (token in drafted)
            calibration.record(zip(raw, [one == token for one in drafted], strict=True))

    def _sources(
        self, context: Context, drafted: Entry | None, uses_found: bool = True
    ) -> tuple[int, list[tuple[int, Entry]]]:
        """Kind of the context, and what each source that knows it says."""
        tail, matches = context
        sources: list[tuple[int, Entry]] = []
        votes = matches.own_votes()
        longest, level = votes.longest, 0
        if longest:
            sources.append((OWN, _counted(votes)))
        if (pooled := matches.pooled_votes()).longest:
            sources.append((POOLED, _counted(pooled)))
        if self.uses_recycled:
            key, get = 0, self.memory.recycled.get
            for size, token in enumerate(reversed(tail), 1):
                key |= (token + 1) << (size - 1) * TOKEN_BITS
                entry = get(key)
                if entry is not None:
                    level = size
                    sources.append((RECYCLED + MAX_KEY - size, entry))
        if not level:
            sources.append((COMMON, self._common))
        if drafted is not None:
            sources.append((DRAFT, drafted))
        if uses_found and self.found is not None and (entry := self._found(tail)) is not None:
            sources.append((FOUND, entry))
        return AdaptiveWeights.kind(longest, level, drafted is not None), sources

    def _found(self, tail: tuple[int, ...]) -> Entry | None:
        """What a window found after the longest end of `tail`."""
        assert self.found is not None
        ends = (self.found.get(key_of(tail[-size:])) for size in range(len(tail), 0, -1))
        return next((entry for entry in ends if entry is not None), None)


def _noise_scores(tokens: Sequence[int], noise: NoiseRow, others: float) -> NoiseScores:
    """What the noise of a draw, `(vocab_size,)`, adds to the scores of these tokens; `others` is that of all others."""
    scores = [
        -math.log(max(float(noise[token]), LEAST_NOISE)) if token < len(noise) else NEVER_DRAWN for token in tokens
    ]
    return scores, -math.log(others)


def _counted(votes: Votes) -> Entry:
    """Votes as evidence."""
    total = votes.total + SMOOTHING_COUNT
    counts = votes.by_token
    return list(counts), [max(0.0, FLOOR + math.log(count / (total - count))) for count in counts.values()]
