"""Rules about the model: its class, foreign code in it, its probe, and lengths at which it computes otherwise."""

from hf_specdec import compat
from hf_specdec.call.request import Request
from hf_specdec.compat.fingerprint import foreign_code as reason_of_foreign_code
from hf_specdec.compat.rotary import cache_drop_length, forgets_text, rotary_modules, rotary_switch, scaled_length

OWN_LOOP = "its class decodes by a loop of its own"
MOST_COLUMNS = 512  # of a step, whatever drafts: lookahead's widest windows have some hundred


def own_loop(request: Request) -> str | None:
    """The class replaces the loop that drafts would enter."""
    return OWN_LOOP if compat.has_own_loop(request.model) else None


def foreign_code(request: Request) -> str | None:
    """Code of the caller's may compress or evict keys and values, so that columns are no longer tokens of the text."""
    return reason_of_foreign_code(request.model)


def one_token_a_forward(request: Request) -> str | None:
    """The probe found no forward of several tokens right."""
    return request.probed.capability.reason if request.tier == "plain" else None


def scaled_trees(request: Request) -> str | None:
    """A single text is verified by chains where attention goes by the columns of the cache."""
    is_chain = request.num_rows > 1 or request.method.needs_tree
    if is_chain or not scales_by_columns(request, _step_columns(request, "tree")):
        return None
    return "its attention goes by the columns of the cache, of which a tree has more than its text"


def scaled_attention(request: Request) -> str | None:
    """Trees and batches have columns that their texts lack."""
    is_alone = request.tier != "tree" and request.num_rows == 1
    if is_alone or not scales_by_columns(request, _step_columns(request, request.tier)):
        return None
    return "its attention goes by the columns of the cache, of which a tree or a batch has others than plain"


def dropped_cache(request: Request) -> str | None:
    """The model computes its cache anew within the text, or forgets the text."""
    length = request.facts.of(cache_drop_length, request.model)
    if length is None or request.call.input_ids.shape[1] > length or not request.call.reaches(length + 1):
        return None
    if request.facts.of(forgets_text, request.model):
        return f"the model forgets its text at {length + 1} tokens, within this text"
    return f"the model computes its cache anew at {length + 1} tokens, within this text"


def rotary_frequencies(request: Request) -> str | None:
    """Rotary frequencies change within the text, or have changed before it."""
    switch = rotary_switch(request.facts.of(rotary_modules, request.model))
    if switch is None or not request.call.reaches(switch + 1):
        return None
    return "its rotary frequencies follow the text's length, which a forward of several tokens does not"


def scales_by_columns(request: Request, most_columns: int = MOST_COLUMNS) -> bool:
    """Returns whether attention goes by the number of columns within the call's texts, or `most_columns` after them."""
    length = request.facts.of(scaled_length, request.model)
    return length is not None and request.call.reaches(length - most_columns)


def _step_columns(request: Request, tier: str) -> int:
    """Most columns of a step."""
    if tier == "chain":
        return 1 + request.budget
    return 1 + max(request.budget, request.config.step_budget) if request.method.name else MOST_COLUMNS
