"""Logits processors and stopping criteria of a batch as one of its rows sees them, and `PerRow`: one for each row.

generate(**batch, logits_processor=[hf_specdec.PerRow(lambda row: GrammarProcessor(grammars[row]))])
"""

import copy
from collections.abc import Callable, Iterable
from typing import Any

import torch
from transformers import LogitsProcessorList, StoppingCriteriaList

from hf_specdec.compat.generation import PROCESSORS_MODULE
from hf_specdec.errors import ConfigError

# Processors that treat every row by itself and keep nothing between calls.
ROW_WISE_PROCESSORS = frozenset(
    f"{PROCESSORS_MODULE}.{name}"
    for name in (
        "EpsilonLogitsWarper",
        "EtaLogitsWarper",
        "ExponentialDecayLengthPenalty",
        "ForcedBOSTokenLogitsProcessor",
        "ForcedEOSTokenLogitsProcessor",
        "InfNanRemoveLogitsProcessor",
        "LogitNormalization",
        "MinLengthLogitsProcessor",
        "MinNewTokensLengthLogitsProcessor",
        "MinPLogitsWarper",
        "NoBadWordsLogitsProcessor",
        "NoRepeatNGramLogitsProcessor",
        "RepetitionPenaltyLogitsProcessor",
        "SequenceBiasLogitsProcessor",
        "SuppressTokensAtBeginLogitsProcessor",
        "SuppressTokensLogitsProcessor",
        "TemperatureLogitsWarper",
        "TopHLogitsWarper",
        "TopKLogitsWarper",
        "TopPLogitsWarper",
        "TypicalLogitsWarper",
        "WatermarkLogitsProcessor",
    )
)
# Those that need no more than a text's ids and scores, if the text is the only one.
PURE_PROCESSORS = ROW_WISE_PROCESSORS | frozenset(
    f"{PROCESSORS_MODULE}.{name}"
    for name in (
        "EncoderNoRepeatNGramLogitsProcessor",
        "EncoderRepetitionPenaltyLogitsProcessor",
        "WhisperTimeStampLogitsProcessor",
    )
)


class PerRow:
    """A logits processor, or a stopping criterion, made for each row of a batch.

    A processor of your own may look at all rows of a batch at once, so a batch that has one is decoded plainly. With
    `PerRow` each row has a processor that sees this row alone, and may keep what it likes between calls: grammars,
    counters. Works in plain `generate` too. In `generate_many` the row is the number of the prompt. A processor
    that keeps nothing between calls needs no `PerRow`: an attribute `row_safe = True` says that it treats each row by
    itself.

    Args:
        make (`Callable[[int], Callable]`): gives the processor, or the criterion, of a row: it is called with token
            ids `(1, length)` and scores `(1, vocab_size)` as transformers calls any, for each token of the row.

    ```python
    logits_processor = [hf_specdec.PerRow(lambda row: SuppressTokensLogitsProcessor([row]))]
    ```
    """

    def __init__(self, make: Callable[[int], Callable[..., Any]]) -> None:
        if not callable(make):
            raise ConfigError("make", "must be callable", make, "Pass a function from a row's index to its processor.")
        self.make = make
        self._made: dict[int, Callable[..., Any]] = {}

    def of_row(self, row: int) -> Callable[..., Any]:
        """The processor of one row, the same at every call."""
        if row not in self._made:
            self._made[row] = self.made(row)
        return self._made[row]

    def made(self, row: int) -> Callable[..., Any]:
        """A new processor for one row.

        Raises:
            ConfigError: `make` gave something that cannot be called.
        """
        processor = self.make(row)
        if not callable(processor):
            raise ConfigError(
                "make", "must return a processor or a criterion", processor, "Return what PerRow is to call."
            )
        return processor

    def __call__(self, input_ids: torch.Tensor, scores: Any) -> torch.Tensor:
        """Process `(batch, length)` ids and `(batch, vocab_size)` scores row by row."""
        results = [
            torch.as_tensor(self.of_row(row)(ids[None], _row_of(scores, row)), device=input_ids.device)
            for row, ids in enumerate(input_ids)
        ]
        return torch.cat([result.reshape(1, *result.shape[1:]) for result in results])  # (batch, ...)


def of_prompt(processors: Iterable[Any], index: int) -> list[Any]:
    """The processors of one prompt of many, where each prompt is a row and none comes twice."""
    return [item.made(index) if isinstance(item, PerRow) else item for item in processors]


def _row_of(scores: Any, row: int) -> Any:
    """One row of the scores; criteria get them as a tuple of steps, or not at all."""
    if isinstance(scores, tuple | list):
        return tuple(step[row : row + 1] for step in scores)
    return scores if scores is None else scores[row : row + 1]


def processors_of_row(processors: Iterable[Any], row: int | None) -> LogitsProcessorList:
    """The processors as they see one row: `(1, length)` ids; `None` is a row without its prompt's padding."""
    return LogitsProcessorList(_of_row(processor, row) for processor in processors)


def criteria_of_row(criteria: Iterable[Any], row: int) -> StoppingCriteriaList:
    """The criteria as they see one row."""
    return StoppingCriteriaList(item.of_row(row) if isinstance(item, PerRow) else item for item in criteria)


def is_pure(processor: object) -> bool:
    """Returns whether a processor calls no function of the user's and no model, and keeps no state between calls."""
    return _name(processor) in PURE_PROCESSORS


def sees_one_row(processor: object) -> bool:
    """Returns whether a processor treats each row by itself."""
    return _name(processor) in ROW_WISE_PROCESSORS or is_declared(processor)


def is_declared(item: object) -> bool:
    """Returns whether a processor or criterion of the caller's declares that it treats each row by itself."""
    return isinstance(item, PerRow) or bool(getattr(item, "row_safe", False))


def _name(item: object) -> str:
    return f"{type(item).__module__}.{type(item).__qualname__}"


def _of_row(processor: Any, row: int | None) -> Any:
    if row is not None and isinstance(processor, PerRow):
        return processor.of_row(row)
    padding = getattr(processor, "prompt_ignore_length", None)
    if not isinstance(padding, torch.Tensor):
        return processor
    of_row = copy.copy(processor)
    of_row.prompt_ignore_length = None if row is None else padding[row : row + 1]
    return of_row
