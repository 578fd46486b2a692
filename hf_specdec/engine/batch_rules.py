"""Whether the rows of a batch can be decoded each at its own pace: whoever looks on must be able to take them apart.

reason = batch_fallback_reason(call)      # None, or why the batch is decoded plainly
processors_of_row(call.logits_processor, 0)
"""

import copy

import torch
from transformers import LogitsProcessorList
from transformers.generation import logits_process

from hf_specdec import compat
from hf_specdec.engine.call import Call

__all__ = ["batch_fallback_reason", "processors_of_row"]

# Processors that treat every row by itself and keep nothing between calls. Others may tell rows apart by their index,
# or count calls, and get the whole batch in step, as plain decoding gives it to them.
ROW_WISE_PROCESSORS = (
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
)


def batch_fallback_reason(call: Call) -> str | None:
    """Why the rows of `call` have to stay in step, or `None`."""
    config = call.generation_config
    if call.streamer is not None:
        return "a streamer of several sequences gets one token of each at a time"
    wanted = [name for name in ("output_scores", "output_logits", "output_hidden_states") if getattr(config, name)]
    if config.return_dict_in_generate and wanted:
        return f"{wanted[0]} of several sequences holds the padding of finished ones too"
    known = tuple(getattr(logits_process, name) for name in ROW_WISE_PROCESSORS if hasattr(logits_process, name))
    for processor in call.logits_processor:
        if type(processor) not in known:
            return f"{type(processor).__name__} may look at several sequences at once"
    row_wise = (compat.MaxLengthCriteria, compat.MaxTimeCriteria, compat.EosTokenCriteria, compat.StopStringCriteria)
    kinds = [type(criterion) for criterion in call.stopping_criteria]
    for kind in kinds:
        if kind not in row_wise:
            return f"{kind.__name__} may look at several sequences at once"
    early = (compat.StopStringCriteria, compat.MaxTimeCriteria)
    if compat.EosTokenCriteria not in kinds and any(kind in kinds for kind in early):
        return "without an end-of-text token no sequence ends before the others"
    return None


def processors_of_row(processors: LogitsProcessorList, row: int | None) -> LogitsProcessorList:
    """The processors as they see one row: `(1, length)` ids. `row` is `None` for ids without the prompt's padding."""
    return LogitsProcessorList(_of_row(processor, row) for processor in processors)


def _of_row(processor: object, row: int | None) -> object:
    padding = getattr(processor, "prompt_ignore_length", None)
    if not isinstance(padding, torch.Tensor):
        return processor
    own = copy.copy(processor)
    own.prompt_ignore_length = None if row is None else padding[row : row + 1]  # type: ignore[attr-defined]
    return own
