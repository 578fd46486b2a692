"""Rules about the model: its class, foreign code in it, its probe, and lengths at which it computes otherwise."""

from hf_specdec.call.request import Request
from hf_specdec.compat.fingerprint import foreign_code as reason_of_foreign_code
from hf_specdec.compat.generation import has_foreign_inputs, has_own_loop
from hf_specdec.compat.rotary import cache_drop_length, rotary_modules, rotary_switch, scaled_length

OWN_LOOP = "its class decodes by a loop of its own"
MOST_COLUMNS = 512  # of a step, whatever drafts: lookahead's widest windows have some hundred


def own_loop(request: Request) -> str | None:
    """The class replaces the loop that drafts would enter."""
    return OWN_LOOP if has_own_loop(request.model) else None


def foreign_code(request: Request) -> str | None:
    """Code of the caller's may compress or evict keys and values, so that columns are no longer tokens of the text."""
    return reason_of_foreign_code(request.model)


def foreign_inputs(request: Request) -> str | None:
    """Code from outside of transformers may prepare other inputs at any length of the text."""
    if has_foreign_inputs(request.model):
        return "code of its own prepares its inputs, and may prepare others at any length of the text"
    return None


def one_token_a_forward(request: Request) -> str | None:
    """The probe found no forward of several tokens right."""
    return request.probed.capability.reason if request.tier == "plain" else None


def scaled_attention(request: Request) -> str | None:
    """Attention goes by the number of columns within the call's texts, or within a step's after them."""
    length = request.facts.of(scaled_length, request.model)
    if length is None or not request.call.reaches(length - MOST_COLUMNS):
        return None
    return "its attention goes by the columns of the cache, of which a step has more than its text"


def dropped_cache(request: Request) -> str | None:
    """The model's class may compute its cache anew within the text, or forget the text."""
    length = request.facts.of(cache_drop_length, request.model)
    if length is None or not request.call.reaches(length + 1):
        return None
    return f"its class may compute the cache anew at {length + 1} tokens, within this text"


def rotary_frequencies(request: Request) -> str | None:
    """Rotary frequencies change within the text, or have changed before it."""
    switch = rotary_switch(request.facts.of(rotary_modules, request.model))
    if switch is None or not request.call.reaches(switch + 1):
        return None
    return "its rotary frequencies follow the text's length, which a forward of several tokens does not"
