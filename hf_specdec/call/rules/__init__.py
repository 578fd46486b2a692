"""Rules that decide how a call is decoded: small functions of a request, in the order of their evaluation.

A rule returns a reason, or `None`. A check raises what is wrong with a call that asks for its method itself; a method
by default then yields to plain decoding. Cheap ones come first, those that need a probe last.
"""

from collections.abc import Callable

from hf_specdec.call.request import Request
from hf_specdec.call.rules import arguments, inputs, model

Rule = Callable[[Request], str | None]
Check = Callable[[Request], None]

# What can be said of a model alone.
MODEL_RULES: tuple[Rule, ...] = (
    model.own_loop,
    model.foreign_code,
    model.foreign_inputs,
    model.one_token_a_forward,
)
# Why a call of a model that none of those rules out is decoded plainly.
CALL_RULES: tuple[Rule, ...] = (
    inputs.repeated_text,
    inputs.shared_states,
    inputs.shown_outputs,
    inputs.decoder_mask,
    model.assisted_loop,
    inputs.static_cache,
    model.scaled_attention,
    model.dropped_cache,
    model.rotary_frequencies,
    inputs.padded_text,
    inputs.rows,
)
# What is refused before transformers prepares the call.
REQUEST_CHECKS: tuple[Check, ...] = (
    arguments.passed_objects,
    model.check_draft,
    arguments.check_settings,
    arguments.check_taken,
    arguments.prompt,
)
# What is refused of a call that no rule decodes plainly.
CHECKS: tuple[Check, ...] = (
    model.chains_only,
    inputs.check_passed_cache,
    model.network,
)
# Why a call that passed these checks is decoded plainly.
CHECKED_RULES: tuple[Rule, ...] = (model.unread_prompt, model.draft_of_rows)
