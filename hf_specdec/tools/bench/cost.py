"""What it costs a machine to verify T tokens at once: the curve t(T)/t(1) at chosen context lengths.

The engine's own loop runs with a drafter that proposes chains of changing length, so a step costs what a verify step
costs, mask and positions included, and all lengths take turns over the same context. Models follow one another: a
curve is of one model. Knows nothing about output.
"""

import itertools
from collections.abc import Callable, Iterator, Sequence
from statistics import median
from typing import Any

import torch
from transformers import StoppingCriteria, StoppingCriteriaList

from hf_specdec.common.tree import DraftTree
from hf_specdec.compat import max_positions
from hf_specdec.errors import ConfigError
from hf_specdec.methods.common.config import check_positive
from hf_specdec.methods.common.drafter import Drafter
from hf_specdec.tools.bench.document import COST, Save
from hf_specdec.tools.bench.header import model_facts, new_document
from hf_specdec.tools.bench.loaded_model import LoadedModel, check_models
from hf_specdec.tools.bench.statistics import median_with_interval

NUM_TOKENS = (1, 2, 4, 8, 16, 32, 64)
WARM_UP_CYCLES = 1

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
            fits = f"{room} more tokens fit the model's {positions} positions"
            rule = f"must be at most {positions - room}, so that {fits}"
            raise ConfigError("context_lengths", rule, length, "Choose a shorter context or fewer rounds.")
    entries: list[dict[str, Any]] = []
    settings = {"rounds": rounds, "seed": seed}
    document = new_document(COST, models[0].device, is_complete=False, settings=settings, models=entries)
    jobs = list(itertools.product(models, context_lengths))
    for number, (loaded, length) in enumerate(jobs):
        if progress is not None:
            progress(f"{loaded.label}, context of {length}", number, len(jobs))
        cycles = _cycles(loaded, length, num_tokens, rounds, seed)
        curve = {"context_length": length, "points": _points(cycles, num_tokens)}
        if number % len(context_lengths):
            entries[-1]["curves"].append(curve)
        else:
            entries.append({**model_facts(loaded), "curves": [curve]})
        if save is not None:
            save(document)
    document["is_complete"] = True
    return document


def _cycles(loaded: LoadedModel, length: int, num_tokens: Sequence[int], rounds: int, seed: int) -> list[list[float]]:
    """Seconds of one verify step for each T, round by round."""
    generator = torch.Generator().manual_seed(seed)
    vocab_size = loaded.model.config.get_text_config().vocab_size
    ids = torch.randint(vocab_size, (1, length), generator=generator).to(loaded.device)
    num_steps = (rounds + WARM_UP_CYCLES) * len(num_tokens)
    seconds: list[float] = []
    loaded.model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=num_steps * 2 + max(num_tokens),
        do_sample=False,
        eos_token_id=None,
        pad_token_id=0,
        stopping_criteria=StoppingCriteriaList([_StopAfter(seconds, num_steps)]),
        spec_method=_ChainDrafter(num_tokens, vocab_size),
        spec_observer=lambda step: seconds.append(step.verify_seconds),
    )
    width = len(num_tokens)
    cycles = [seconds[start : start + width] for start in range(0, num_steps, width)]
    return cycles[WARM_UP_CYCLES:]


def _points(cycles: Sequence[Sequence[float]], num_tokens: Sequence[int]) -> list[dict[str, Any]]:
    """For each T the median time, and the median of its ratios to the T=1 of the same round."""
    return [
        {
            "num_tokens": count,
            "seconds": median(cycle[index] for cycle in cycles),
            "ratio": median_with_interval([cycle[index] / cycle[0] for cycle in cycles]),
        }
        for index, count in enumerate(num_tokens)
    ]


class _ChainDrafter(Drafter):
    """Proposes chains of arbitrary tokens, whose lengths take turns."""

    def __init__(self, num_tokens: Sequence[int], vocab_size: int) -> None:
        self._lengths: Iterator[int] = itertools.cycle(num_tokens)
        self._vocab_size = vocab_size

    def begin(self, prompt_ids: Sequence[int]) -> None:
        """Remember the last token."""
        self._last = prompt_ids[-1]

    def propose(self, budget: int) -> DraftTree:
        """The next length, the root counted."""
        drafted = [(self._last + 1 + index) % self._vocab_size for index in range(next(self._lengths) - 1)]
        return DraftTree.chain(self._last, drafted)

    def observe(self, tree: DraftTree, logits: torch.Tensor | None, accepted: Sequence[int]) -> None:
        """Remember the last token."""
        self._last = accepted[-1]


class _StopAfter(StoppingCriteria):
    """Ends the text when enough steps have been seen; the step under way is one more."""

    def __init__(self, seen: Sequence[float], num_steps: int) -> None:
        self._seen, self._num_steps = seen, num_steps

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        done = len(self._seen) + 1 >= self._num_steps
        return torch.full((input_ids.shape[0],), done, dtype=torch.bool, device=input_ids.device)
