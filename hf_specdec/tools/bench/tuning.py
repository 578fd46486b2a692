"""Costs of a model's forwards of T tokens, measured for a file that `auto` reads.

tuned = measure_costs(model, batch_sizes=(1, 8), context_length=512)
tuned.costs.save("costs.json", tuned.facts)
model.generate(**inputs, spec_method="auto", auto_config={"costs": "costs.json"})
"""

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from transformers import GenerationConfig, PreTrainedModel

from hf_specdec import compat
from hf_specdec.engine.cost.cost_facts import facts_of
from hf_specdec.engine.cost.cost_model import ORDER, CostCurve, StepCosts
from hf_specdec.errors import ConfigError
from hf_specdec.methods.common.config import check_positive
from hf_specdec.tools.bench.forward_times import time_steps

TOKENS = ("bos_token_id", "decoder_start_token_id", "forced_bos_token_id")
MOST_TOKENS = 64  # a root and 63 drafted tokens


@dataclass(frozen=True, slots=True)
class Tuned:
    """Measured costs.

    Attributes:
        costs: the curves.
        facts: model, device and setting that they hold for.
        seconds (`dict[int, dict[int, float]]`): median seconds of a forward, by batch size and tokens a row.
    """

    costs: StepCosts
    facts: dict[str, Any]
    seconds: dict[int, dict[int, float]]


def measure_costs(
    model: Any,
    *,
    batch_sizes: Sequence[int] = (1,),
    context_length: int = 512,
    seconds: float = 20.0,
    rounds: int = 15,
    save: Callable[[Tuned], None] | None = None,
) -> Tuned:
    """Time steps of 1 to 64 tokens a row after `context_length` tokens.

    Args:
        batch_sizes: rows, each size a curve of its own; sizes are rounded up to powers of two when they are used.
        seconds: when to stop, for each batch size; no step begins that would end later.
        rounds: times that each number of tokens is tried; the medians count.
        save (*optional*): gets what was measured so far after each batch size.

    Raises:
        ConfigError: a number below 1, a context that the model has no positions for, or too few `seconds` for steps
            of more than one token.
        UnsupportedModelError: the model decodes without speculation.
    """
    inner: PreTrainedModel = compat.generation_model(model)
    for size in batch_sizes:
        check_positive("batch_sizes", size, "Usual values are 1 to 32.")
    check_positive("context_length", context_length, "Usual values are 128 to 4096.")
    room, positions = len(ORDER) * rounds + MOST_TOKENS, compat.max_positions(inner.config)
    if positions is not None and context_length + room > positions:
        rule = f"must leave room for {room} tokens in the model's {positions} positions"
        raise ConfigError("context_length", rule, context_length, f"Use at most {positions - room}.")
    device = compat.input_device(inner)
    costs = StepCosts.of_device(device)
    tuned = Tuned(costs, {**facts_of(inner, device), "context_length": context_length}, {})
    with _unconfigured(inner):
        for rows in sorted(set(batch_sizes)):
            times: dict[int, list[float]] = {}
            curve = costs.curve(rows)
            time_steps(
                inner,
                _sizes_in_time(times, curve, seconds, rounds),
                lambda size, taken, times=times: times.setdefault(size, []).append(taken),  # type: ignore[misc]
                rows=rows,
                length=context_length,
                most_tokens=room,
            )
            tuned.seconds[rows] = _set_curve(curve, times, seconds)
            if save is not None:
                save(tuned)
    return tuned


def _set_curve(curve: CostCurve, times: dict[int, list[float]], seconds: float) -> dict[int, float]:
    """Teach a curve the medians; returns them."""
    found = {size: median(tries) for size, tries in sorted(times.items())}
    if len(found) < 2 or 1 not in found:
        rule = "must leave time for forwards of one token and of more, for each batch size"
        raise ConfigError("seconds", rule, seconds, "The default is 20.")
    curve.set(found)
    curve.seconds_of_one = found[1]
    return found


def _sizes_in_time(times: dict[int, list[float]], curve: CostCurve, seconds: float, rounds: int) -> Iterator[int]:
    """Sizes of steps that there is time for.

    Args:
        times: of the steps so far, by size.
    """
    begun = time.perf_counter()
    for size in ORDER * rounds:
        expected = median(times[1]) * curve.ratio(size) if 1 in times else 0.0
        if time.perf_counter() - begun + expected <= seconds:
            yield size


@contextlib.contextmanager
def _unconfigured(model: PreTrainedModel) -> Iterator[None]:
    """A block in which the generation configuration names tokens alone."""
    kept = model.generation_config
    model.generation_config = GenerationConfig(**{name: getattr(kept, name, None) for name in TOKENS})
    try:
        yield
    finally:
        model.generation_config = kept
