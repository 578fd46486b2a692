"""Lookahead's window with auto's trees: n-grams that no text holds yet, where they are worth the window's columns.

What the target says after the window's columns is kept as its logits after verified nodes are, but apart: a prediction
about a text that may never come to be. How many tokens such predictions add is learned while one is there; where it
does not pay, one is tried for a while, ever so often, to notice a change. Knows neither clocks nor models.
"""

import random
from collections.abc import Sequence

from hf_specdec.common.tree import DraftTree, ExtraTokens
from hf_specdec.methods.auto.adaptive_weights import INITIAL_WINDOW_GAIN, AdaptiveWeights
from hf_specdec.methods.auto.recycled_logits import MAX_KEY, RecycledLogits, best_tokens
from hf_specdec.methods.common.node_logits import NodeLogits
from hf_specdec.methods.lookahead.window import JacobiWindow

MAX_FOUND = 8_192  # entries kept of a text's windows
TRIAL = 32  # steps of a trial; a window takes as many as it has levels to fill
RETRY = 512  # steps without a window after which one is tried


class AutoWindow:
    """The window of one text, present while it pays.

    Args:
        size (`int`): columns W, at least 2.
        ngram_size (`int`): tokens N of its n-grams, at least 2.
        adaptive_weights: knows what windows added so far, and learns it.

    Attributes:
        found: what the target said after the columns of this text's windows.
    """

    def __init__(self, size: int, ngram_size: int, adaptive_weights: AdaptiveWeights) -> None:
        self.size, self.ngram_size, self.adaptive_weights = size, ngram_size, adaptive_weights
        self.found = RecycledLogits(MAX_FOUND)
        self._window: JacobiWindow | None = None
        self._trial = self._skipped = 0

    @property
    def num_columns(self) -> int:
        """Tokens of a full window besides the root."""
        return self.size * (self.ngram_size - 1) - 1

    def extra_tokens(self, text: Sequence[int], min_gain: float) -> ExtraTokens | None:
        """The window for the next forward; `None` where it is not worth its columns.

        Args:
            text: so far, its last token the root.
            min_gain: expected tokens that a column has to gain; 0 where it is not known.
        """
        if not self._pays(min_gain * self.num_columns):
            self._window = None
            return None
        if self._window is None:
            draws = random.Random(len(text))
            self._window = JacobiWindow(width=self.size, num_levels=self.ngram_size - 1, source=text, generator=draws)
        self._window.set_root(text[-1])
        return self._window.extra()

    def observe(self, tree: DraftTree, logits: NodeLogits) -> None:
        """Keep what the target says after each column, and move on; nothing where the forward had no window."""
        if self._window is None or tree.extra is None:
            return
        first = tree.num_columns - self.size
        if len(self._window.levels) > 1:
            rows: slice | list[int] = slice(first, tree.num_columns)
        else:  # the root is its first column
            rows = [0, *range(first + 1, tree.num_columns)]
        entries = best_tokens(logits, rows)
        for column, entry in zip(zip(*self._window.levels, strict=True), entries, strict=True):
            self.found.put(column[-MAX_KEY:], entry)
        self._window.observe([tokens[0] for tokens, _ in entries])

    def _pays(self, min_gain: float) -> bool:
        """True if windows add as many tokens a step, as far as is known, or if this step is a trial's."""
        if not min_gain:
            return False
        if self.adaptive_weights.window_gain >= min_gain:
            return True
        if self._trial:
            self._trial -= 1
            return True
        if min_gain <= INITIAL_WINDOW_GAIN:
            self._skipped += 1
            self._trial = TRIAL if self._skipped % RETRY == 0 else 0
        return False
