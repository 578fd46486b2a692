"""Batches of examples, and what is measured over the batches of an evaluation."""

import random
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import Dataset
from transformers import EvalPrediction

from hf_specdec.tools.train.examples import Example


class Texts(Dataset[dict[str, Any]]):
    """Examples as `transformers.Trainer` reads them."""

    def __init__(self, examples: Sequence[Example]) -> None:
        self.examples = examples

    def __len__(self) -> int:
        return len(self.examples)

    def __getitem__(self, index: int) -> dict[str, Any]:
        example = self.examples[index]
        return {"input_ids": example.ids, "num_prompt_tokens": example.num_prompt_tokens}


def in_batches(examples: Sequence[Example], batch_size: int, seed: int) -> list[Example]:
    """The examples in an order that puts those of about one length into one batch, and the batches in a drawn order.

    It is the same in every epoch, so that a resumed training sees what an uninterrupted one sees.
    """
    ordered = sorted(examples, key=lambda example: len(example.ids))
    rest = ordered[: len(ordered) % batch_size]
    batches = [ordered[start : start + batch_size] for start in range(len(rest), len(ordered), batch_size)]
    random.Random(seed).shuffle(batches)
    return [example for batch in [*batches, rest] for example in batch]


def collated(rows: Sequence[Mapping[str, Any]]) -> dict[str, torch.Tensor]:
    """Texts padded in front, so that what is learned begins in the same column in all of them, and behind their ends.

    Returns:
        input_ids, attention_mask, learned: `(N, L)`; first: `(N,)`, the column where `learned` begins.
    """
    first = max(row["num_prompt_tokens"] for row in rows)
    fronts = [first - row["num_prompt_tokens"] for row in rows]
    ids = [torch.tensor([0] * front + row["input_ids"]) for front, row in zip(fronts, rows, strict=True)]
    seen = [torch.tensor([0] * front + [1] * len(row["input_ids"])) for front, row in zip(fronts, rows, strict=True)]
    attention_mask = pad_sequence(seen, batch_first=True)
    learned = attention_mask.bool()
    learned[:, :first] = False
    return {
        "input_ids": pad_sequence(ids, batch_first=True),
        "attention_mask": attention_mask,
        "learned": learned,
        "first": torch.full((len(rows),), first),
    }


def measured(prediction: EvalPrediction) -> dict[str, Any]:
    """Acceptance over an evaluation: `accepted`, the share of positions by draft step, and `tokens_per_step`."""
    accepted, num_positions = prediction.predictions
    rates = (accepted.sum(0) / max(int(num_positions.sum()), 1)).tolist()
    return {"accepted": rates, "tokens_per_step": 1.0 + sum(rates)}
