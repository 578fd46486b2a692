"""Texts of a model that are led out of their loops: what it learns from to write none."""

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
import torch
from transformers import PreTrainedModel

from demos.train_embedded.corpus import pieces
from demos.train_embedded.loops import loop_periods

LEAST_PLACES = 4  # to choose from, where a copy has fewer tokens


@dataclass
class LoopFreeText:
    """What a model wrote greedily, led out of its first loops by one token each.

    Attributes:
        ids: the prompt and what follows.
        avoided: for each loop it was led out of, the place in `ids` and the token that would have gone on with it.
    """

    ids: list[int]
    avoided: list[tuple[int, int]] = field(default_factory=list)


@torch.no_grad()
def loop_free_texts(
    model: PreTrainedModel, prompts: torch.Tensor, new_tokens: int, most_loops: int = 3
) -> list[LoopFreeText]:
    """`prompts`, `(rows, length)`, continued greedily by `model` and led out of each text's first `most_loops` loops.

    The way out is the place in the loop's last copy, or in its last four tokens where a copy has fewer, where another
    token comes nearest to the one that goes on with it.
    """
    begin, end = prompts.shape[1], prompts.shape[1] + new_tokens
    texts = [LoopFreeText(ids) for ids in _continue(model, prompts.tolist(), end)]
    chosen = texts
    for _ in range(most_loops):
        periods = loop_periods(torch.tensor([text.ids for text in chosen])[:, begin:])
        rows = (periods > 0).any(1).nonzero().flatten().tolist()
        if not rows:
            break
        chosen, periods = [chosen[row] for row in rows], periods[rows]
        logits = _logits(model, [text.ids for text in chosen])
        for text, found, scores in zip(chosen, periods, logits, strict=True):
            place = int((found > 0).int().argmax())
            _lead_out(text, begin + place + 1, int(found[place]), scores)
        for text, ids in zip(chosen, _continue(model, [text.ids for text in chosen], end), strict=True):
            text.ids = ids
    return texts


def _lead_out(text: LoopFreeText, end: int, period: int, logits: torch.Tensor) -> None:
    """Cuts `text` in the copy before `end` and puts another token there. `logits` are `(length, vocab)`."""
    places = torch.arange(end - max(period, LEAST_PLACES), end)
    scores = logits[places - 1]
    for place, token in text.avoided:
        if place >= int(places[0]) and place < end:
            scores[place - int(places[0]), token] = -torch.inf
    going_on = torch.tensor(text.ids)[places, None]
    kept = scores.gather(1, going_on)
    others, tokens = scores.scatter(1, going_on, -torch.inf).max(1)
    nearest = int((others - kept[:, 0]).argmax())
    place = int(places[nearest])
    text.avoided.append((place, text.ids[place]))
    text.ids = [*text.ids[:place], int(tokens[nearest])]


def _continue(model: PreTrainedModel, begun: list[list[int]], length: int) -> list[list[int]]:
    """Each row of `begun`, whose lengths may differ, continued greedily to `length` tokens."""
    longest, shortest = max(map(len, begun)), min(map(len, begun))
    if shortest == length:
        return begun
    padding = [longest - len(ids) for ids in begun]
    ids = torch.tensor([[0] * pad + row for pad, row in zip(padding, begun, strict=True)], device=model.device)
    mask = torch.tensor(
        [[0] * pad + [1] * len(row) for pad, row in zip(padding, begun, strict=True)], device=model.device
    )
    written = model.generate(
        input_ids=ids,
        attention_mask=mask,
        max_new_tokens=length - shortest,
        do_sample=False,
        eos_token_id=None,
        pad_token_id=0,
    )
    return [row[pad : pad + length] for pad, row in zip(padding, written.tolist(), strict=True)]


def _logits(model: PreTrainedModel, ids: list[list[int]]) -> torch.Tensor:
    """`(rows, length, vocab)` in fp32, on the CPU."""
    logits: torch.Tensor = model(input_ids=torch.tensor(ids, device=model.device), use_cache=False).logits
    return logits.float().cpu()


def stream_of_loop_free_texts(
    model: PreTrainedModel,
    tokens: np.ndarray,
    *,
    rows: int,
    at_once: int = 128,
    every: int = 8,
    newest: int = 72,
    prompt_length: int = 64,
    new_tokens: int = 128,
    seed: int = 0,
) -> Iterator[list[LoopFreeText]]:
    """Endless groups of at most `rows` texts that were led out of loops, after pieces of `tokens`.

    Before each `every` groups `model`, as it then is, writes `at_once` texts; groups are of the `newest` that looped.
    """
    rng = np.random.default_rng(seed)
    known: deque[LoopFreeText] = deque(maxlen=newest)
    while True:
        starts = rng.integers(len(tokens) - prompt_length, size=at_once)
        written = loop_free_texts(model, pieces(tokens, starts, prompt_length), new_tokens)
        known.extend(text for text in written if text.avoided)
        for _ in range(every):
            yield [known[place] for place in rng.choice(len(known), min(rows, len(known)), replace=False)]
