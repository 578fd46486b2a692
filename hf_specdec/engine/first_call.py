"""A model's first call finds out on its own text whether trees can be verified, where it is long enough."""

from typing import Any

from hf_specdec.capabilities.findings import Found
from hf_specdec.capabilities.probe import verifies_trees
from hf_specdec.capabilities.trial import SHORTEST_CALL, can_be_tried
from hf_specdec.compat.fingerprint import fingerprint
from hf_specdec.distributed.rank_sync import rank_sync_of
from hf_specdec.engine.call import Call
from hf_specdec.engine.model_state import state_of
from hf_specdec.methods.draft_head import DraftHead
from hf_specdec.request import Request
from hf_specdec.stats import SpecStats

__all__ = ["FirstCall", "first_call_of"]


class FirstCall:
    """A call that tries its model.

    Attributes:
        found (`Found`): what holds if the model passes.
    """

    def __init__(self, call: Call, key: Any, stats: SpecStats) -> None:
        self.model, self.stats, self._key = call.model, stats, key
        self._num_rows = len(call.input_ids)
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
        if reason is None:
            return True
        self.stats.tier, self.stats.plain_reason = "plain", reason
        state.warn_once(f"{type(self.model).__name__} decodes without speculation: {reason}")
        return False


def first_call_of(call: Call, request: Request, stats: SpecStats) -> FirstCall | None:
    """The trial that goes with a call; `None` where everything is known, or the probe has to find it out."""
    config, method = call.generation_config, request.method
    reads_states = isinstance(request.assistant_model, DraftHead) or (
        method is not None and method.own_head is not None
    )
    new_tokens = (config.max_length or 0) - call.input_ids.shape[1]
    shows_states = config.return_dict_in_generate and (config.output_hidden_states or config.output_attentions)
    if (
        new_tokens < SHORTEST_CALL
        or not call.input_ids.shape[1]
        or shows_states
        or request.config.engine != "loop"
        or reads_states
        or request.config.is_deterministic  # the second call would draft from the first token on
        or request.config.drafting_layers is not None
        or not rank_sync_of(call.model).is_alone
    ):
        return None
    key = fingerprint(call.model)
    found = state_of(call.model).findings.known(key)
    if found is not None and (found.knows_rows or found.capability.tier != "tree" or len(call.input_ids) == 1):
        return None
    return FirstCall(call, key, stats) if can_be_tried(call.model, call.model_kwargs) else None
