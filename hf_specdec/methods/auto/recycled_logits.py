"""Recycled logits: what the target last thought likely behind one, two and three tokens.

Every verified node, kept or rejected, shows the target's best next tokens there. They are kept under the node's last
tokens, and are guesses when the same tokens come again. Source: https://arxiv.org/abs/2408.08696 (Token Recycling),
which keys by one token; longer keys beside it know the context better. Averaging what was seen under one key drafted
no better than the newest alone.

Two generations bound the memory: a full young one becomes the old one, and what the old one held is forgotten. Safe
to share between threads.

    recycled = RecycledLogits(max_entries=262_144)
    recycled.put((5, 6, 7), best_tokens(logits)[0])    # under (7,), (6, 7) and (5, 6, 7)
    recycled.get((6, 7))
"""

import threading
from collections.abc import Sequence
from typing import Any

import torch

__all__ = ["FLOOR", "MAX_KEY", "Entries", "Entry", "RecycledLogits", "best_tokens", "log_odds"]

MAX_KEY = 3
NUM_KEPT = 8  # next tokens kept of a node; 16 drafted no better
FLOOR = 7.0  # evidence is counted from log odds of -7, about 1 in 1,000

Entry = tuple[tuple[int, ...], tuple[float, ...]]  # next tokens, likeliest first, and the evidence for each
Entries = dict[tuple[int, ...], Entry]


class RecycledLogits:
    """Entries by their last tokens, `MAX_KEY` of them and fewer.

    Args:
        max_entries (`int`): bound of the memory; an entry holds 8 tokens, about 600 bytes.
    """

    def __init__(self, max_entries: int) -> None:
        self.max_entries = max_entries
        self._young: Entries = {}
        self._old: Entries = {}
        self._lock = threading.Lock()

    def __len__(self) -> int:
        """Entries kept, those counted twice that were renewed."""
        return len(self._young) + len(self._old)

    def get(self, key: tuple[int, ...]) -> Entry | None:
        """What the target thought likely when it last stood behind `key`."""
        return self._young.get(key) or self._old.get(key)

    def put(self, tokens: tuple[int, ...], entry: Entry) -> None:
        """Keep what the target thinks likely behind `tokens`, at most `MAX_KEY` of them, and behind their ends."""
        if len(self._young) + len(tokens) > self.max_entries // 2:
            with self._lock:
                if self._young and len(self._young) + len(tokens) > self.max_entries // 2:
                    self._old, self._young = self._young, {}
        young = self._young
        for start in range(len(tokens)):
            young[tokens[start:]] = entry

    def resize(self, max_entries: int) -> None:
        """Change the bound; where less fits than there is, the newest entries stay."""
        with self._lock:
            self.max_entries, half = max_entries, max_entries // 2
            if len(self._old) <= half and len(self._young) <= half:
                return
            entries = [*self._old.items(), *self._young.items()]
            end = len(entries) - half
            self._young, self._old = dict(entries[max(end, 0) :]), dict(entries[max(end - half, 0) : max(end, 0)])

    def generations(self) -> tuple[Entries, Entries]:
        """The entries of the old and of the young generation."""
        with self._lock:
            return dict(self._old), dict(self._young)

    def restore(self, old: Entries, young: Entries) -> None:
        """Hold these entries, as `generations` gave them."""
        with self._lock:
            self._old, self._young = old, young

    def __getstate__(self) -> dict[str, Any]:
        with self._lock:
            state = {name: value for name, value in vars(self).items() if name != "_lock"}
            return {**state, "_young": dict(self._young), "_old": dict(self._old)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._lock = threading.Lock()


def best_tokens(logits: torch.Tensor) -> Sequence[Entry]:
    """One entry for each row of `(C, vocab_size)` raw logits."""
    top = logits.topk(min(NUM_KEPT, logits.shape[-1]), dim=-1)
    log_shares = top.values.float() - logits.logsumexp(dim=-1, keepdim=True).float()
    shares = log_shares.exp_().double()
    both = torch.stack((log_odds(shares), top.indices.double())).tolist()  # one transfer
    return [(tuple(map(int, tokens)), tuple(evidence)) for evidence, tokens in zip(*both, strict=True)]


def log_odds(probabilities: torch.Tensor) -> torch.Tensor:
    """Evidence that probabilities are: their log odds above the floor, none below it."""
    return torch.logit(probabilities, eps=1e-6).add_(FLOOR).clamp_(min=0.0)
