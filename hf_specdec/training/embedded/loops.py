"""Loops in texts, and texts that a model writes without beginning any."""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from transformers import LogitsProcessor, LogitsProcessorList, PreTrainedModel

from hf_specdec.training.embedded.corpus import pieces

MAX_PERIOD, COPIES, MIN_TOKENS = 48, 3, 8


def loop_mask(ids: torch.Tensor) -> torch.Tensor:
    """Where a text loops: True from a period's third copy in a row on. `(batch, length)` bool, as `ids`.

    A period of p tokens counts from `COPIES` copies on, and only over at least `MIN_TOKENS` tokens in all.
    """
    mask = torch.zeros_like(ids, dtype=torch.bool)
    length = ids.shape[1]
    for period in range(1, min(MAX_PERIOD, length // COPIES) + 1):
        run = _equal_tokens(period)
        same = torch.zeros_like(mask)
        same[:, period:] = ids[:, period:] == ids[:, :-period]
        total = F.pad(same.int().cumsum(1), (1, 0))
        full = (total[:, run:] - total[:, :-run]) == run
        mask[:, run - 1 :] |= full
    return mask


def _equal_tokens(period: int) -> int:
    """How many tokens in a row, each equal to the one a period before it, make a loop."""
    return max(period * (COPIES - 1), MIN_TOKENS - period)


class NoLoops(LogitsProcessor):
    """Takes from each row the tokens with which the last copy of a loop would begin or go on.

    Args:
        prompt_length (`int`): tokens that count for no loop.
    """

    def __init__(self, prompt_length: int) -> None:
        self.prompt_length = prompt_length

    def __call__(self, input_ids: torch.LongTensor, scores: torch.FloatTensor) -> torch.FloatTensor:
        """`scores`, `(batch, vocab)`, with minus infinity for each token taken. `input_ids` is `(batch, length)`."""
        text = input_ids[:, self.prompt_length :]
        length = text.shape[1]
        kept = scores.clone()
        for period in range(1, MAX_PERIOD + 1):
            run = _equal_tokens(period) - period  # equal tokens before the last copy
            if run + period > length:
                continue
            rows = (text[:, length - run :] == text[:, length - run - period : length - period]).all(1)
            kept[rows, text[rows, length - period]] = -torch.inf
        return kept  # type: ignore[return-value]


@dataclass(frozen=True)
class LooplessTexts:
    """Texts that a model wrote greedily with `NoLoops`, and what it chose from.

    Attributes:
        ids: prompts and texts, `(rows, prompt + new)`.
        wanted: its distributions of the new tokens without the tokens taken, `(rows, new, vocab)`.
        taken: share of its own distributions that was taken, `(rows, new)`.
    """

    ids: torch.Tensor
    wanted: torch.Tensor
    taken: torch.Tensor

    def split(self, rows: int) -> "Iterator[LooplessTexts]":
        """Pieces of `rows` texts."""
        for first in range(0, len(self.ids), rows):
            piece = slice(first, first + rows)
            yield LooplessTexts(self.ids[piece], self.wanted[piece], self.taken[piece])


def loopless_texts(model: PreTrainedModel, prompts: torch.Tensor, new_tokens: int) -> LooplessTexts:
    """`prompts`, `(rows, prompt)`, continued greedily by `model` without loops."""
    written = model.generate(
        input_ids=prompts,
        attention_mask=torch.ones_like(prompts),
        max_new_tokens=new_tokens,
        do_sample=False,
        eos_token_id=None,
        logits_processor=LogitsProcessorList([NoLoops(prompts.shape[1])]),
        return_dict_in_generate=True,
        output_scores=True,
        output_logits=True,
    )
    scores, logits = torch.stack(written.scores, 1), torch.stack(written.logits, 1)  # (rows, new, vocab)
    taken = (logits.softmax(-1) * scores.isneginf()).sum(-1)
    return LooplessTexts(written.sequences, scores.softmax(-1), taken)


def stream_of_loopless_texts(
    model: PreTrainedModel,
    tokens: np.ndarray,
    *,
    rows: int,
    at_once: int = 64,
    prompt_length: int = 64,
    new_tokens: int = 128,
    seed: int = 0,
) -> Iterator[LooplessTexts]:
    """Endless groups of `rows` texts after pieces of `tokens`; `model` as it then is writes `at_once` together."""
    rng = np.random.default_rng(seed)
    while True:
        starts = rng.integers(len(tokens) - prompt_length, size=at_once)
        prompts = pieces(tokens, starts, prompt_length).to(model.device)
        yield from loopless_texts(model, prompts, new_tokens).split(rows)
