"""Whether the rows of a batch can be decoded each at its own pace: whoever looks on must be able to take them apart.

The same of one sequence whose mask hides tokens. And whether transformers' assisted decoding can show its rejected
tokens to who looks on.
"""

import copy
from collections.abc import Callable, Iterable
from typing import Any

import torch
from transformers import LogitsProcessorList, StoppingCriteriaList, SynthIDTextWatermarkingConfig

from hf_specdec import compat
from hf_specdec.compat.processors import take_prefix_row
from hf_specdec.engine.call import Call
from hf_specdec.forward.capabilities.findings import Found
from hf_specdec.request.per_row import PerRow

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
ROW_WISE_CRITERIA = (
    compat.MaxLengthCriteria,
    compat.MaxTimeCriteria,
    compat.EosTokenCriteria,
    compat.StopStringCriteria,
)


def batch_fallback_reason(call: Call) -> str | None:
    """Why the rows of `call` have to stay in lockstep, or `None`."""
    if call.streamer is not None:
        return "a streamer of several sequences gets one token of each at a time"
    for processor in call.logits_processor:
        if (reason := _reason_against(processor)) is not None:
            return reason
    ends_rows = False
    for criterion in call.stopping_criteria:
        if type(criterion) not in ROW_WISE_CRITERIA and not _is_declared(criterion):
            return _undeclared(criterion)
        ends_rows |= not isinstance(criterion, compat.MaxLengthCriteria | compat.EosTokenCriteria)
    if ends_rows and not any(isinstance(criterion, compat.EosTokenCriteria) for criterion in call.stopping_criteria):
        return "without an end-of-text token no sequence ends before the others"
    return None


def padding_fallback_reason(call: Call, found: Found) -> str | None:
    """Why no tree is verified for a call of one sequence whose mask hides tokens; a chain goes by the model's mask."""
    if found.capability.tier != "tree" or not call.is_padded:
        return None
    reason = found.batch_fallback_reason(call.model)
    return None if reason is None else f"its attention_mask hides tokens, and {reason}"


def assisted_fallback_reason(processors: Iterable[object]) -> str | None:
    """Why transformers' assisted decoding with these processors would change the text, or `None`."""
    for processor in processors:
        if isinstance(processor, PerRow) or _name(processor) in KEEPS_TEXT:
            return (
                f"{type(processor).__name__} keeps state, in which transformers' assisted decoding has rejected tokens"
            )
    return None


def may_keep_state(settings: Callable[[str], Any], processors: Iterable[object]) -> bool:
    """Whether a call whose processors transformers has yet to make may get an `assisted_fallback_reason`.

    Args:
        settings: gives the value a generation setting will have in this call, `None` where it is unset.
        processors: those that the user gives.
    """
    return (
        settings("guidance_scale") not in (None, 1)
        or isinstance(settings("watermarking_config"), SynthIDTextWatermarkingConfig)
        or assisted_fallback_reason(processors) is not None
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
    """Whether a processor knows which row is which, or keeps something of each."""
    return isinstance(processor, PerRow) or _name(processor) in OF_ROW


def is_pure(processor: object) -> bool:
    """Whether a processor calls no function of the user's and no model, and keeps nothing between calls."""
    return _name(processor) in PURE_PROCESSORS


def _reason_against(processor: object) -> str | None:
    """Why a processor needs all rows of the batch in lockstep, or `None`."""
    name = _name(processor)
    if name in ROW_WISE_PROCESSORS or _is_declared(processor):
        return None
    if name not in OF_ROW:
        return _undeclared(processor)
    if name in WAS_USED and WAS_USED[name](processor):
        return f"{type(processor).__name__} has been used before, and holds the state of several sequences"
    return None


def _is_declared(item: object) -> bool:
    return isinstance(item, PerRow) or bool(getattr(item, "row_safe", False))


def _undeclared(item: object) -> str:
    what = f"{type(item).__name__} may look at several sequences at once"
    if type(item).__module__.startswith("transformers."):
        return f"transformers' {what}; generate one prompt at a time"
    return f"{what}; if it does not, set its `row_safe = True`, or wrap it in hf_specdec.PerRow where it keeps state"


def _name(item: object) -> str:
    return f"{type(item).__module__}.{type(item).__qualname__}"


def _of_row(processor: Any, row: int | None, num_rows: int) -> Any:
    if row is not None and isinstance(processor, PerRow):
        return processor.of_row(row)
    if row is not None and (take := OF_ROW.get(_name(processor))) is not None:
        own = copy.copy(processor)
        take(own, row, num_rows)
        return own
    padding = getattr(processor, "prompt_ignore_length", None)
    if not isinstance(padding, torch.Tensor):
        return processor
    own = copy.copy(processor)
    own.prompt_ignore_length = None if row is None else padding[row : row + 1]
    return own


def _take_encoder_ids(own: Any, row: int, num_rows: int) -> None:
    """One text's ids, of `(texts, length)`: several rows may continue one text."""
    text = row // (num_rows // len(own.encoder_input_ids))
    own.encoder_input_ids = own.encoder_input_ids[text : text + 1]


def _take_encoder_ngrams(own: Any, row: int, num_rows: int) -> None:
    own.generated_ngrams = [own.generated_ngrams[row // (num_rows // own.batch_size)]]
    own.batch_size = 1


def _take_prefix_function(own: Any, row: int, num_rows: int) -> None:
    take_prefix_row(own, row)


def _take_grammar(own: Any, row: int, num_rows: int) -> None:
    grammars = own.compiled_grammars
    own.compiled_grammars = [grammars[row] if len(grammars) > 1 else grammars[0]]


def _take_nothing(own: Any, row: int, num_rows: int) -> None:
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
