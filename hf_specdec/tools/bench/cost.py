"""Cost of verifying T tokens at once on a machine: the curve t(T)/t(1) at chosen context lengths.

All sizes take turns over the same context; models follow one another, since a curve is of one model.
"""

import itertools
from collections.abc import Callable, Iterator, Sequence
from statistics import median
from typing import Any

from hf_specdec.compat import max_positions
from hf_specdec.errors import ConfigError
from hf_specdec.methods.common.config import check_positive
from hf_specdec.tools.bench.document import Save, add_table
from hf_specdec.tools.bench.forward_times import time_steps
from hf_specdec.tools.bench.header import model_facts, new_document
from hf_specdec.tools.bench.loaded_model import LoadedModel, check_models
from hf_specdec.tools.bench.statistics import median_with_interval

COST = "cost"
NUM_TOKENS = (1, 2, 4, 8, 16, 32, 64)
WARM_UP_CYCLES = 1
NOTE = "Median of the ratios to one token in the same round; in brackets the 95 % bootstrap interval."

Progress = Callable[[str, int, int], None]


def measure_cost(
    models: Sequence[LoadedModel],
    *,
    context_lengths: Sequence[int] = (128, 512),
    num_tokens: Sequence[int] = NUM_TOKENS,
    rounds: int = 10,
    seed: int = 0,
    progress: Progress | None = None,
    save: Save | None = None,
) -> dict[str, Any]:
    """Measure the curves.

    Args:
        models (`Sequence[LoadedModel]`): the models, all on the same device.
        context_lengths (`Sequence[int]`, *optional*, defaults to `(128, 512)`): tokens in the cache, each a curve of
            its own for each model.
        num_tokens (`Sequence[int]`, *optional*, defaults to `(1, 2, 4, 8, 16, 32, 64)`): T, the nodes verified at once,
            the first of them 1.
        rounds (`int`, *optional*, defaults to `10`): times that each T is measured at each context length.
        seed (`int`, *optional*, defaults to `0`): of the tokens in the cache.
        progress (`Callable`, *optional*): called before each measurement with its description, its number and the
            number of all.
        save (`Callable`, *optional*): called after each curve with the document so far.

    Raises:
        ConfigError: a length below 1, or one that a model has no positions for.
    """
    check_models(models)
    check_positive("rounds", rounds, "Ten give a steady median.")
    for length in (*context_lengths, *num_tokens):
        check_positive("context_lengths and num_tokens", length, "Usual values are 128 to 4096, and 1 to 64.")
    if num_tokens[0] != 1:
        raise ConfigError("num_tokens", "must begin with 1", list(num_tokens), "The curve is relative to it.")
    room = (rounds + WARM_UP_CYCLES) * len(num_tokens) + max(num_tokens)
    for loaded, length in itertools.product(models, context_lengths):
        positions = max_positions(loaded.model.config)
        if positions is not None and length + room > positions:
            rule = (
                f"must be at most {positions - room}, so that {room} more tokens fit the model's {positions} positions"
            )
            raise ConfigError("context_lengths", rule, length, "Choose a shorter context or fewer rounds.")
    settings = {"rounds": rounds, "seed": seed, "num_tokens": list(num_tokens)}
    document = new_document(COST, models[0].device, settings=settings, notes=[NOTE])
    jobs = list(itertools.product(models, context_lengths))
    for number, (loaded, length) in enumerate(jobs):
        if progress is not None:
            progress(f"{loaded.label}, context of {length}", number, len(jobs))
        points = _points(loaded, length, num_tokens, rounds, seed)
        if number % len(context_lengths) == 0:
            document["models"].append(model_facts(loaded))
            name = f"{loaded.label}: " if len(models) > 1 else ""
            curves = add_table(document, f"{name}t(T) / t(1)", dict(_columns(num_tokens)))
        curves.append({"context_length": length, "one_ms": 1000 * points[0]["seconds"], "points": points})
        if save is not None:
            save(document)
    document["is_complete"] = True
    return document


def _columns(num_tokens: Sequence[int]) -> Iterator[tuple[str, str]]:
    yield "", "context of {context_length}"
    yield "t(1)", "{one_ms:.2f} ms"
    for place, count in enumerate(num_tokens[1:], 1):
        ratio = f"points[{place}][ratio]"
        yield f"T = {count}", f"{{{ratio}[median]:.2f}} [{{{ratio}[low]:.2f}}-{{{ratio}[high]:.2f}}]"


def _points(
    loaded: LoadedModel, length: int, num_tokens: Sequence[int], rounds: int, seed: int
) -> list[dict[str, Any]]:
    """Median time of each T, and the median of its ratios to the T=1 of the same round."""
    seconds: list[float] = []
    width, num_cycles = len(num_tokens), rounds + WARM_UP_CYCLES
    time_steps(
        loaded.model,
        [*num_tokens] * num_cycles,
        lambda size, taken: seconds.append(taken),
        rows=1,
        length=length,
        most_tokens=2 * width * num_cycles + max(num_tokens),
        seed=seed,
    )
    cycles = [seconds[width * cycle : width * (cycle + 1)] for cycle in range(WARM_UP_CYCLES, num_cycles)]
    return [
        {
            "num_tokens": count,
            "seconds": median(cycle[index] for cycle in cycles),
            "ratio": median_with_interval([cycle[index] / cycle[0] for cycle in cycles]),
        }
        for index, count in enumerate(num_tokens)
    ]
