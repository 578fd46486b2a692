"""What the next token may be, by everything that is known without a model: one probability a candidate.

Sources, from long contexts to short ones: where the context stood before in this text and in earlier ones, and the
target's recycled logits behind the last three, two and one tokens; a draft model's tokens join where it has been
asked. A `Mixer` blends them, a `Calibration` corrects what it says by what was accepted. Both learn from every token
of the text, drafted or not, so a text that cannot be drafted costs no trials to find out.

    predictor = Predictor(memory, index, is_sampled=False)
    guess = predictor.guess(Context.of_text(index, memory.pool))
    guess.tokens, guess.probabilities          # likeliest first
    predictor.learn(guess, token)
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from hf_specdec.drafters.experience import Experience
from hf_specdec.drafters.matches import Matches, Votes
from hf_specdec.drafters.ngram_index import NgramIndex
from hf_specdec.drafters.ngram_pool import NgramPool
from hf_specdec.drafters.recycled import FLOOR, MAX_KEY, Entry
from hf_specdec.drafters.spec_memory import SpecMemory

__all__ = ["Context", "Guess", "Predictor"]

DOUBT = 4.0  # votes that stand for tokens never seen behind the context
OWN, POOLED, RECYCLED, DRAFT = 0, 1, 2, 2 + MAX_KEY  # places of the sources in a row of evidence
NOTHING = (0.0,) * (DRAFT + 1)


@dataclass(frozen=True, slots=True)
class Context:
    """Where a guess is asked for: the text and the drafted tokens behind it.

    Attributes:
        tail (`tuple[int, ...]`): the last `MAX_KEY` tokens.
        matches: where they stood before.
    """

    tail: tuple[int, ...]
    matches: Matches

    @classmethod
    def of_text(cls, index: NgramIndex, pool: NgramPool | None) -> "Context":
        """The end of the text."""
        return cls(tuple(index.tokens[-MAX_KEY:]), Matches.of_text(index, pool))

    def after(self, token: int) -> "Context":
        """The same with `token` behind it."""
        return Context((*self.tail, token)[-MAX_KEY:], self.matches.after(token))


@dataclass(frozen=True, slots=True)
class Guess:
    """Candidates for the token behind one context.

    Attributes:
        kind (`int`): kind of the context, see `Mixer`.
        tokens (`list[int]`): the candidates.
        evidence (`list[Sequence[float]]`): for each its evidence by source.
        raw (`list[float]`): its probability before the correction.
        probabilities (`list[float]`): its probability; together they are at most 1.
    """

    kind: int
    tokens: list[int]
    evidence: list[list[float]]
    raw: list[float]
    probabilities: list[float]


class Predictor:
    """Guesses and learns for one text.

    Args:
        memory: recycled logits and what was learned about the sources, this text's alone or shared.
        is_sampled: whether tokens are drawn: other weights, since unlikely tokens come true more often.
        uses_recycled: whether recycled logits take part.
    """

    def __init__(self, memory: SpecMemory, *, is_sampled: bool, uses_recycled: bool = True) -> None:
        self.memory, self.uses_recycled = memory, uses_recycled
        self.experience: Experience = memory.experience(is_sampled)

    def guess(self, context: Context, drafted: Entry | None = None) -> Guess:
        """Candidates behind `context`; `drafted` is a draft model's entry for it, if it was asked."""
        rows: dict[int, list[float]] = {}
        longest = self._count(rows, OWN, context.matches.own_votes())
        self._count(rows, POOLED, context.matches.pooled_votes())
        level = 0
        if self.uses_recycled:
            for size in range(len(context.tail), 0, -1):
                entry = self.memory.recycled.get(context.tail[-size:])
                if entry is not None:
                    level = level or size
                    _note(rows, RECYCLED + MAX_KEY - size, entry)
        if drafted is not None:
            _note(rows, DRAFT, drafted)
        kind = Experience.kind(longest, level, drafted is not None)
        evidence = list(rows.values())
        raw = self.experience.mixer.probabilities(kind, evidence)
        corrected = list(map(self.experience.calibration.corrected, raw))
        total = sum(corrected)
        if total > 1.0:
            corrected = [probability / total for probability in corrected]
        return Guess(kind, list(rows), evidence, raw, corrected)

    def learn(self, guess: Guess, token: int, drafted: Sequence[int]) -> None:
        """The token behind the context was `token`; `drafted` are the candidates that were verified there."""
        right = guess.tokens.index(token) if token in guess.tokens else None
        self.experience.mixer.learn(guess.kind, guess.evidence, right)
        if drafted:
            outcomes = [(guess.raw[guess.tokens.index(one)], one == token) for one in drafted]
            self.experience.calibration.record(outcomes)

    @staticmethod
    def _count(rows: dict[int, list[float]], source: int, votes: Votes) -> int:
        """Note the votes as evidence; returns the longest match."""
        total = votes.total + DOUBT
        for token, count in votes.by_token.items():
            row = rows.get(token)
            if row is None:
                row = rows[token] = [*NOTHING]
            row[source] = max(0.0, FLOOR + math.log(count / (total - count)))
        return votes.longest


def _note(rows: dict[int, list[float]], source: int, entry: Entry) -> None:
    for token, evidence in zip(*entry, strict=True):
        row = rows.get(token)
        if row is None:
            row = rows[token] = [*NOTHING]
        row[source] = evidence
