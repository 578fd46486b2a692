"""What drafting costs a step as the context grows: ours beside transformers' prompt lookup, on the host.

The context is made up: tokens by Zipf's law, with passages copied from before, as in text. Knows nothing about models.

    python -m hf_specdec.bench.draft_cost --json
"""

import json
import random
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate
from typing import Annotated, Any

import torch
import typer

from hf_specdec.bench.transformers_lookup import transformers_generator
from hf_specdec.errors import SpecError
from hf_specdec.methods.base import Drafter
from hf_specdec.methods.prompt_lookup.config import PromptLookupConfig
from hf_specdec.methods.prompt_lookup.drafter import PromptLookupDrafter

__all__ = ["CONTEXT_LENGTHS", "draft_cost", "made_up_text"]

CONTEXT_LENGTHS = (1_000, 10_000, 100_000)
VOCAB_SIZE = 32_000
COPY_SHARE, COPY_LENGTH = 0.02, 12  # one token in fifty starts a passage that stood in the text before


def made_up_text(length: int, seed: int = 0) -> list[int]:
    """`length` tokens that repeat themselves about as much as written text does."""
    generator = random.Random(seed)
    weights = list(accumulate(1 / rank for rank in range(1, VOCAB_SIZE + 1)))
    drawn = generator.choices(range(VOCAB_SIZE), cum_weights=weights, k=length)
    text: list[int] = []
    while len(text) < length:
        if len(text) > COPY_LENGTH and generator.random() < COPY_SHARE:
            start = generator.randrange(len(text) - COPY_LENGTH)
            text += text[start : start + COPY_LENGTH]
        else:
            text.append(drawn[len(text)])
    return text[:length]


def draft_cost(
    config: PromptLookupConfig, context_lengths: Sequence[int] = CONTEXT_LENGTHS, num_steps: int = 200
) -> list[dict[str, float]]:
    """Median seconds a step, one token accepted each: `propose` and `observe`, and transformers' `get_candidates`.

    Returns:
        `list[dict]`: for each length `context_length`, `seconds`, `transformers_seconds`, and `begin_seconds`, which
        is spent once on indexing the prompt.
    """
    points = []
    for length in context_lengths:
        text = made_up_text(length + num_steps)
        drafter = PromptLookupDrafter(config)
        start = time.perf_counter()
        drafter.begin(text[:length])
        begin_seconds = time.perf_counter() - start
        ours = statistics.median(_timed(_our_steps(drafter, config.node_budget, text[length:])))
        theirs = statistics.median(_timed(_transformers_steps(config, text, length)))
        points.append(
            {
                "context_length": length,
                "seconds": ours,
                "transformers_seconds": theirs,
                "begin_seconds": begin_seconds,
            }
        )
    return points


def _timed(steps: Iterator[Callable[[], Any]]) -> Iterator[float]:
    for step in steps:
        start = time.perf_counter()
        step()
        yield time.perf_counter() - start


def _our_steps(drafter: Drafter, budget: int, tokens: Sequence[int]) -> Iterator[Callable[[], Any]]:
    for token in tokens:
        yield lambda token=token: drafter.observe(drafter.propose(budget), None, [token])  # type: ignore[misc]


def _transformers_steps(config: PromptLookupConfig, text: list[int], length: int) -> Iterator[Callable[[], Any]]:
    generator = transformers_generator(config.max_draft_len, config.max_matching_ngram_size)
    ids = torch.tensor([text])
    for end in range(length, len(text)):
        yield lambda end=end: generator.get_candidates(ids[:, :end])  # type: ignore[misc]


def main(
    config: Annotated[str, typer.Option(help="Prompt-lookup configuration, list form or dict.")] = "{}",
    steps: Annotated[int, typer.Option(min=1, help="Steps timed at each length.")] = 200,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON document on stdout.")] = False,
) -> None:
    """Draft seconds a step at 1k, 10k and 100k tokens of context."""
    try:
        parsed = PromptLookupConfig.parse(config, "config")
    except SpecError as error:
        typer.echo(f"error: {error}", err=True)
        raise typer.Exit(2) from error
    torch.set_num_threads(1)
    points = draft_cost(parsed, num_steps=steps)
    if as_json:
        typer.echo(json.dumps({"config": config, "num_steps": steps, "threads": 1, "points": points}))
        return
    for point in points:
        ours, theirs = point["seconds"] * 1e6, point["transformers_seconds"] * 1e6
        typer.echo(f"{point['context_length']:>7} tokens: {ours:8.1f} us a step, transformers {theirs:8.1f} us")


if __name__ == "__main__":
    typer.run(main)
