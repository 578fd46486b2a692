"""Rules about batches: rows go at their own pace only where nothing has to see all of them at once."""

from hf_specdec import compat
from hf_specdec.call.facts import Facts
from hf_specdec.call.request import Request
from hf_specdec.engine.sampling.row_processors import is_declared, sees_one_row, was_used

ROW_WISE_CRITERIA = (
    compat.MaxLengthCriteria,
    compat.MaxTimeCriteria,
    compat.EosTokenCriteria,
    compat.StopStringCriteria,
)


def padded_cache(facts: Facts, request: Request) -> str | None:
    """Rows are padded in cache layers that the model's own file defines."""
    is_padded = facts.kwargs.get("attention_mask") is not None and not facts.model.config.is_encoder_decoder
    if facts.num_rows > 1 and is_padded and facts.structure.of(compat.has_own_cache, facts.model):
        return "padding meets cache layers of the model's own, which a few tokens cannot try out"
    return None


def streamer(facts: Facts, request: Request) -> str | None:
    """A streamer shows a token of each row at a time."""
    if facts.num_rows > 1 and facts.call.streamer is not None:
        return "a streamer of several sequences gets one token of each at a time"
    return None


def processors(facts: Facts, request: Request) -> str | None:
    """A logits processor needs all rows in lockstep."""
    for processor in facts.call.logits_processor if facts.num_rows > 1 else ():
        if was_used(processor):
            return f"{type(processor).__name__} has been used before, and holds the state of several sequences"
        if not sees_one_row(processor):
            return _undeclared(processor)
    return None


def criteria(facts: Facts, request: Request) -> str | None:
    """A stopping criterion looks at all rows, or rows end together."""
    ends_rows, ends_texts = False, False
    for criterion in facts.call.stopping_criteria if facts.num_rows > 1 else ():
        if type(criterion) not in ROW_WISE_CRITERIA and not is_declared(criterion):
            return _undeclared(criterion)
        ends_texts |= isinstance(criterion, compat.EosTokenCriteria)
        ends_rows |= not isinstance(criterion, compat.MaxLengthCriteria | compat.EosTokenCriteria)
    if ends_rows and not ends_texts:
        return "without an end-of-text token no sequence ends before the others"
    return None


def rows_of_model(facts: Facts, request: Request) -> str | None:
    """The probe found no batch of rows with lengths of their own right."""
    return facts.batch_reason() if facts.num_rows > 1 else None


def _undeclared(item: object) -> str:
    name, remedy = (
        type(item).__name__,
        "set its `row_safe = True`, or wrap it in hf_specdec.PerRow where it keeps state",
    )
    if type(item).__module__.startswith("transformers."):
        return f"transformers' {name} may look at several sequences at once; generate one prompt at a time"
    return f"{name} may look at several sequences at once; if it does not, {remedy}"
