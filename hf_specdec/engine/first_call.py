"""A model's first call finds out on its own text whether trees can be verified, where it is long enough."""

from transformers import PreTrainedModel

from hf_specdec.capabilities.findings import Found
from hf_specdec.capabilities.probe import verifies_trees
from hf_specdec.capabilities.trial import SHORTEST_CALL, can_be_tried
from hf_specdec.capabilities.trial_rows import RowTrial
from hf_specdec.compat.fingerprint import fingerprint
from hf_specdec.distributed.rank_sync import rank_sync_of
from hf_specdec.engine.batch_rules import padding_fallback_reason
from hf_specdec.engine.call import Call
from hf_specdec.engine.length_rules import scales_by_columns
from hf_specdec.engine.model_state import state_of
from hf_specdec.methods.draft_head import DraftHead
from hf_specdec.request.request import Request
from hf_specdec.stats import SpecStats

__all__ = ["FirstCall", "can_try", "first_call_of", "row_trial_of"]


class FirstCall:
    """A call that tries its model.

    Attributes:
        found (`Found`): what holds if the model passes.
    """

    def __init__(self, call: Call, stats: SpecStats) -> None:
        self.model, self.stats, self._key = call.model, stats, call.now
        self._call, self._num_rows = call, len(call.input_ids)
        self.found = Found(verifies_trees(call.model, 0.0), knows_rows=True)

    def decide(self, error: float | None) -> bool:
        """Keep what was found out; returns whether the call verifies trees.

        Args:
            error: largest difference of a logit in the trial; `None` where it says nothing, and the probe decides.
        """
        state = state_of(self.model)
        if error is not None:
            found = Found(verifies_trees(self.model, error), knows_rows=self._num_rows > 1)
            state.findings.keep(self._key, found)
            return True
        found = state.findings.of(self.model)
        reason = None if found.capability.tier == "tree" else found.capability.reason
        if reason is None and self._num_rows > 1:
            reason = found.batch_fallback_reason(self.model)
        elif reason is None:
            reason = padding_fallback_reason(self._call, found)
        if reason is None:
            return True
        self.stats.tier, self.stats.plain_reason = "plain", reason
        state.warn_once(f"{type(self.model).__name__} decodes without speculation: {reason}")
        return False


def can_try(call: Call, request: Request) -> bool:
    """Whether a call has tokens to try its model with, of its prompt and after it, and nothing that would hinder it."""
    if not _may_try(call.model, request):
        return False
    is_long = (call.max_new_tokens or 0) >= SHORTEST_CALL and call.input_ids.shape[1] > 0
    return is_long and can_be_tried(call.model, call.model_kwargs) and not scales_by_columns(call)


def _may_try(model: PreTrainedModel, request: Request) -> bool:
    """Whether calls of this kind may try their model."""
    method = request.method
    reads_states = isinstance(request.assistant_model, DraftHead) or (
        method is not None and method.own_head is not None
    )
    return (
        request.config.engine == "loop"
        and not reads_states
        and not request.config.is_deterministic  # the second call would draft from the first token on
        and request.config.drafting_layers is None
        and rank_sync_of(model).is_alone
    )


def row_trial_of(model: PreTrainedModel, request: Request, most_rows: int) -> RowTrial | None:
    """The trial that goes with a job of many prompts; `None` where all is known, or the probe has to tell."""
    key, findings = fingerprint(model), state_of(model).findings
    known = findings.known(key)
    if not _may_try(model, request) or _is_known(known, most_rows):
        return None

    def decide(error: float, num_rows: int, has_others: bool) -> bool:
        found = Found(verifies_trees(model, error), knows_rows=num_rows > 1)
        findings.keep(key, found)
        return not has_others or found.batch_fallback_reason(model) is None

    return RowTrial(decide, most_rows, knows_trees=known is not None)


def first_call_of(call: Call, request: Request, stats: SpecStats) -> FirstCall | None:
    """The trial that goes with a call; `None` where everything is known, or the probe has to find it out."""
    if _is_known(state_of(call.model).findings.known(call.now), len(call.input_ids)):
        return None
    config = call.generation_config
    shows_states = config.return_dict_in_generate and (config.output_hidden_states or config.output_attentions)
    if shows_states or not can_try(call, request):
        return None
    return FirstCall(call, stats)


def _is_known(found: Found | None, num_rows: int) -> bool:
    """Whether a trial of so many rows would tell nothing new."""
    return found is not None and (found.knows_rows or found.capability.tier != "tree" or num_rows == 1)
