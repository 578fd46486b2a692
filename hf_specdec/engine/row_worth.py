"""What a token is worth in each row of a batch whose rows end together: its time is that of the row that ends last.

Rows whose texts have ended wait for the others, so a token of a row that is ahead gains no time, and one of the row
that is most behind gains a whole step. Who is behind is told by the steps that a row still needs at its own rate so
far.
"""

from collections.abc import Sequence

from hf_specdec.engine.sequence import SequenceState

__all__ = ["row_worths"]

FIRST_TOKENS = 8  # as many that each row is taken to have got at the same rate, before its own says something
STEEPNESS = 4.0  # a row that needs half the steps of the last one is worth its share to this power
LEAST = 0.02  # so that no row is left out for good


def row_worths(sequences: Sequence[SequenceState]) -> list[float]:
    """Worth of a token in each row, by a mean of 1 over the rows whose texts go on; 0 where they have ended.

    Rows have begun together. Where nothing bounds a text, all are worth the same.
    """
    live = [not sequence.finished for sequence in sequences]
    if sum(live) < 2 or any(not s.tokens_left for s, goes_on in zip(sequences, live, strict=True) if goes_on):
        return [float(goes_on) for goes_on in live]
    needed = [
        sequence.tokens_left / (sequence.length - sequence.text.prompt_length + FIRST_TOKENS) if goes_on else 0.0
        for sequence, goes_on in zip(sequences, live, strict=True)
    ]
    most = max(needed)
    worths = [max(LEAST, (steps / most) ** STEEPNESS) if steps else 0.0 for steps in needed]
    mean = sum(worths) / sum(live)
    return [worth / mean for worth in worths]
