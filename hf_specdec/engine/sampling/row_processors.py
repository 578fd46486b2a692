"""Logits processors and stopping criteria of a batch as one of its rows sees them."""

import copy
from collections.abc import Callable, Iterable
from typing import Any

import torch
from transformers import LogitsProcessorList, StoppingCriteriaList

from hf_specdec import compat
from hf_specdec.compat.generation import take_prefix_row
from hf_specdec.engine.sampling.per_row import PerRow

TRANSFORMERS = compat.PROCESSORS_MODULE
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


def processors_of_row(processors: Iterable[Any], row: int | None, num_rows: int = 1) -> LogitsProcessorList:
    """The processors as they see one row of `num_rows`: `(1, length)` ids.

    `row` is `None` for ids without the prompt's padding; then they must not keep rows apart.
    """
    return LogitsProcessorList(_of_row(processor, row, num_rows) for processor in processors)


def criteria_of_row(criteria: Iterable[Any], row: int) -> StoppingCriteriaList:
    """The criteria as they see one row."""
    return StoppingCriteriaList(item.of_row(row) if isinstance(item, PerRow) else item for item in criteria)


def keeps_rows_apart(processor: object) -> bool:
    """Returns whether a processor knows which row is which, or keeps state of each row."""
    return isinstance(processor, PerRow) or _name(processor) in OF_ROW


def is_pure(processor: object) -> bool:
    """Returns whether a processor calls no function of the user's and no model, and keeps no state between calls."""
    return _name(processor) in PURE_PROCESSORS


def sees_one_row(processor: object) -> bool:
    """Returns whether a processor, or the copy of it that a row gets, treats the row by itself."""
    name = _name(processor)
    return name in ROW_WISE_PROCESSORS or name in OF_ROW or is_declared(processor)


def is_declared(item: object) -> bool:
    """Returns whether a processor or criterion of the caller's declares that it treats each row by itself."""
    return isinstance(item, PerRow) or bool(getattr(item, "row_safe", False))


def was_used(processor: object) -> bool:
    """Returns whether a processor that cannot be copied for each row holds the state of several rows."""
    return not is_declared(processor) and _name(processor) in WAS_USED and WAS_USED[_name(processor)](processor)


def keeps_text(processor: object) -> bool:
    """Returns whether a processor keeps state of each token that it is called for."""
    return isinstance(processor, PerRow) or _name(processor) in KEEPS_TEXT


def _name(item: object) -> str:
    return f"{type(item).__module__}.{type(item).__qualname__}"


def _of_row(processor: Any, row: int | None, num_rows: int) -> Any:
    if row is not None and isinstance(processor, PerRow):
        return processor.of_row(row)
    if row is not None and (take := OF_ROW.get(_name(processor))) is not None:
        of_row = copy.copy(processor)
        take(of_row, row, num_rows)
        return of_row
    padding = getattr(processor, "prompt_ignore_length", None)
    if not isinstance(padding, torch.Tensor):
        return processor
    of_row = copy.copy(processor)
    of_row.prompt_ignore_length = None if row is None else padding[row : row + 1]
    return of_row


def _take_encoder_ids(processor: Any, row: int, num_rows: int) -> None:
    """One text's ids, of `(texts, length)`: several rows may continue one text."""
    text = row // (num_rows // len(processor.encoder_input_ids))
    processor.encoder_input_ids = processor.encoder_input_ids[text : text + 1]


def _take_encoder_ngrams(processor: Any, row: int, num_rows: int) -> None:
    processor.generated_ngrams = [processor.generated_ngrams[row // (num_rows // processor.batch_size)]]
    processor.batch_size = 1


def _take_prefix_function(processor: Any, row: int, num_rows: int) -> None:
    take_prefix_row(processor, row)


def _take_grammar(processor: Any, row: int, num_rows: int) -> None:
    grammars = processor.compiled_grammars
    processor.compiled_grammars = [grammars[row] if len(grammars) > 1 else grammars[0]]


def _take_nothing(processor: Any, row: int, num_rows: int) -> None:
    """An unused copy begins with the state of one row."""


# How a copy of a processor that keeps rows apart becomes that of one row.
OF_ROW: dict[str, Callable[[Any, int, int], None]] = {
    f"{TRANSFORMERS}.EncoderNoRepeatNGramLogitsProcessor": _take_encoder_ngrams,
    f"{TRANSFORMERS}.EncoderRepetitionPenaltyLogitsProcessor": _take_encoder_ids,
    f"{TRANSFORMERS}.PrefixConstrainedLogitsProcessor": _take_prefix_function,
    f"{TRANSFORMERS}.SynthIDTextWatermarkLogitsProcessor": _take_nothing,
    "outlines.backends.llguidance.LLGuidanceLogitsProcessor": _take_nothing,
    "outlines.backends.outlines_core.OutlinesCoreLogitsProcessor": _take_nothing,
    "outlines.backends.xgrammar.XGrammarLogitsProcessor": _take_nothing,
    "xgrammar.contrib.hf.LogitsProcessor": _take_grammar,
}
# Whether a processor that makes its state at the first call has made it.
WAS_USED: dict[str, Callable[[Any], bool]] = {
    f"{TRANSFORMERS}.SynthIDTextWatermarkLogitsProcessor": lambda processor: processor.state is not None,
    "outlines.backends.llguidance.LLGuidanceLogitsProcessor": lambda processor: not processor.is_first_token,
    "outlines.backends.outlines_core.OutlinesCoreLogitsProcessor": lambda processor: not processor.is_first_token,
    "outlines.backends.xgrammar.XGrammarLogitsProcessor": lambda processor: not processor.is_first_token,
    "xgrammar.contrib.hf.LogitsProcessor": lambda processor: bool(processor.matchers),
}
# Processors that keep something of each token that they are called for.
KEEPS_TEXT = frozenset({f"{TRANSFORMERS}.UnbatchedClassifierFreeGuidanceLogitsProcessor", *WAS_USED})
