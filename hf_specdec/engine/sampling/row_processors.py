"""Logits processors and stopping criteria of a batch as one of its rows sees them."""

import copy
from collections.abc import Iterable
from typing import Any

import torch
from transformers import LogitsProcessorList, StoppingCriteriaList

from hf_specdec.compat.generation import PROCESSORS_MODULE
from hf_specdec.engine.sampling.per_row import PerRow

TRANSFORMERS = PROCESSORS_MODULE
# Processors that treat every row by itself and keep nothing between calls.
ROW_WISE_PROCESSORS = frozenset(
    f"{TRANSFORMERS}.{name}"
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
    f"{TRANSFORMERS}.{name}"
    for name in (
        "EncoderNoRepeatNGramLogitsProcessor",
        "EncoderRepetitionPenaltyLogitsProcessor",
        "WhisperTimeStampLogitsProcessor",
    )
)


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
