"""Drafts that know the noise of the coming draws take the tokens that those draws choose."""

from typing import Any

import pytest
import torch

from hf_specdec import AutoSpecConfig, SpecMemory
from hf_specdec.methods.auto.drafter import AutoDrafter
from hf_specdec.methods.common.sampling import coupled
from hf_specdec.methods.draft_model.config import DraftModelConfig
from hf_specdec.methods.draft_model.drafter import DraftModelDrafter
from tests.helpers.drafts import Table, TableScorer, drafted_by, random_table

SIZE, TEXT = 40, (3, 1)


class Noise:
    """Of a seed."""

    def __init__(self, seed: int, size: int = SIZE) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.rows = [torch.empty(size).exponential_(generator=generator) for _ in range(8)]

    def row(self, depth: int) -> torch.Tensor:
        return self.rows[depth]

    def on_host(self, depth: int) -> Any:
        return self.rows[depth].numpy()


def drawn(table: Table, noise: Noise, temperature: float, count: int) -> list[int]:
    """The text that a target of these logits draws."""
    tokens = list(TEXT)
    for depth in range(count):
        probabilities = (table(tuple(tokens)) / temperature).softmax(dim=-1)
        tokens.append(int((probabilities / noise.rows[depth]).argmax()))
    return tokens[len(TEXT) :]


def drafter_of(kind: str, table: Table, temperature: float) -> Any:
    scorer = TableScorer(table, vocab_size=SIZE, takes_trees=kind != "auto chain")
    if kind == "draft_model":
        config = DraftModelConfig(draft_len=4, confidence_threshold=0.0)
        return DraftModelDrafter(config, scorer, logits_processor=lambda ids, rows: rows / temperature)
    return AutoDrafter(
        AutoSpecConfig(draft_len=4),
        SpecMemory(),
        scorer=scorer,
        logits_processor=lambda ids, rows: rows / temperature,
        is_sampled=True,
        takes_trees=kind == "auto",
    )


@pytest.mark.parametrize("temperature", [0.5, 1.5])
@pytest.mark.parametrize("kind", ["draft_model", "auto", "auto chain"])
def test_what_is_drafted_is_what_will_be_drawn(kind: str, temperature: float) -> None:
    """Where the draft's logits are the target's; a likeliest token seldom is."""
    table, met, likeliest = random_table(seed=2, vocab_size=SIZE), 0, 0
    for seed in range(20):
        noise = Noise(seed)
        for noise_ahead in (None, noise):
            drafter = drafter_of(kind, table, temperature)
            drafter.begin(TEXT)
            tree, expected = drafted_by(drafter, 4, noise=noise_ahead), drawn(table, noise, temperature, 4)
            node = depth = 0
            while depth < 4 and (child := tree.child(node, expected[depth])) is not None:
                node, depth = child, depth + 1
            if noise_ahead is None:
                likeliest += depth
            else:
                met += depth
    assert met > 20 * (3.9 if kind == "draft_model" else 1.5)
    assert met > 1.5 * likeliest


def test_a_draft_s_vocabulary_may_be_smaller_or_larger() -> None:
    """What the target does not have is never drawn."""
    noise = Noise(0)
    for size in (SIZE - 5, SIZE, SIZE + 5):
        logits = torch.zeros(2, size)
        rows = coupled(logits, [0, 3], noise)
        assert rows.shape == logits.shape
        best = [int(noise.rows[depth][: min(size, SIZE)].argmin()) for depth in (0, 3)]
        assert rows.argmax(dim=-1).tolist() == best
        assert bool((rows[:, SIZE:] == -torch.inf).all())
