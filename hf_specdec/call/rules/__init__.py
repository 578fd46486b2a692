"""Rules that decide how a call is decoded: small functions of `(facts, request)`, in the order of their evaluation.

A rule returns a reason, or `None`. A check raises what is wrong with a call that asks for its method itself; a method
by default then yields to plain decoding. Cheap ones come first, those that need a probe last.
"""

from collections.abc import Callable

from hf_specdec.call.facts import Facts
from hf_specdec.call.request import Request
from hf_specdec.call.rules import assisted, batch, cache, inputs, length, method, model, settings

Rule = Callable[[Facts, Request], str | None]
Check = Callable[[Facts, Request], None]

# What can be said of a model alone.
MODEL_RULES: tuple[Rule, ...] = (
    model.own_loop,
    model.foreign_code,
    model.one_token_a_forward,
)
# Why a call of a model that none of those rules out is decoded plainly.
CALL_RULES: tuple[Rule, ...] = (
    cache.repeated_text,
    inputs.shared_states,
    inputs.foreign_inputs,
    inputs.attention_output,
    inputs.decoder_mask,
    cache.static_cache,
    length.scaled_attention,
    length.dropped_cache,
    length.rotary_frequencies,
    assisted.assisted_loop,
    inputs.padded_text,
    batch.padded_cache,
    batch.streamer,
    batch.processors,
    batch.criteria,
    batch.rows_of_model,
)
# What is refused before transformers prepares the call.
REQUEST_CHECKS: tuple[Check, ...] = (
    settings.custom_generate,
    method.draft_model,
    settings.streamer,
    settings.modes,
    settings.assisted_arguments,
    settings.prompt,
)
# What is refused of a call that no rule decodes plainly.
CHECKS: tuple[Check, ...] = (
    method.chains_only,
    cache.check_given_cache,
    assisted.check_embeddings,
    method.first_layers,
    method.network,
)
# Why a call that passed these checks is decoded plainly.
CHECKED_RULES: tuple[Rule, ...] = (method.unread_prompt,)
