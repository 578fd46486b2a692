"""Rules about lengths at which a model changes how it computes, within the texts of the call."""

from hf_specdec.call.facts import Facts
from hf_specdec.call.request import Request
from hf_specdec.compat.rotary import (
    cache_drop_length,
    forgets_text,
    grows,
    has_several_positions,
    rotary_modules,
    rotary_switch,
    scaled_length,
)

MOST_COLUMNS = 512  # of a step, whatever drafts: lookahead's widest windows have some hundred


def scaled_trees(facts: Facts, request: Request) -> str | None:
    """A single text is verified by chains where attention goes by the columns of the cache."""
    needs_tree = request.method is not None and request.method.needs_tree
    if facts.num_rows > 1 or needs_tree or not scales_by_columns(facts, _step_columns(request, "tree")):
        return None
    return "its attention goes by the columns of the cache, of which a tree has more than its text"


def scaled_attention(facts: Facts, request: Request) -> str | None:
    """Trees and batches have columns that their texts lack."""
    is_alone = facts.tier != "tree" and facts.num_rows == 1
    if is_alone or not scales_by_columns(facts, _step_columns(request, facts.tier)):
        return None
    return "its attention goes by the columns of the cache, of which a tree or a batch has others than plain"


def dropped_cache(facts: Facts, request: Request) -> str | None:
    """The model computes its cache anew within the text, or forgets the text."""
    length = facts.structure.of(cache_drop_length, facts.model)
    if length is None or facts.call.input_ids.shape[1] > length or not facts.call.reaches(length + 1):
        return None
    if facts.structure.of(forgets_text, facts.model):
        return f"the model forgets its text at {length + 1} tokens, within this text"
    return f"the model computes its cache anew at {length + 1} tokens, within this text"


def rotary_frequencies(facts: Facts, request: Request) -> str | None:
    """Rotary frequencies change within the text."""
    if not exceeds_original_length(facts) or _is_beyond_the_switch(facts):
        return None
    return "its rotary frequencies follow the text's length, which a forward of several tokens does not"


def _is_beyond_the_switch(facts: Facts) -> bool:
    """Returns whether the frequencies have changed before the text's first new token, once and for all."""
    modules = facts.structure.of(rotary_modules, facts.model)
    if facts.num_rows > 1 or any(grows(module) or has_several_positions(module) for module in modules):
        return False
    positions, switch = facts.kwargs.get("position_ids"), rotary_switch(modules)
    length = facts.call.input_ids.shape[1] if positions is None else int(positions.max()) + 1
    return switch is not None and length > switch


def scales_by_columns(facts: Facts, most_columns: int = MOST_COLUMNS) -> bool:
    """Returns whether attention goes by the number of columns within the call's texts, or `most_columns` after them."""
    length = facts.structure.of(scaled_length, facts.model)
    return length is not None and facts.call.reaches(length - most_columns)


def exceeds_original_length(facts: Facts) -> bool:
    """Returns whether rotary frequencies may change within the call's texts."""
    switch = rotary_switch(facts.structure.of(rotary_modules, facts.model))
    return switch is not None and facts.call.reaches(switch + 1)


def _step_columns(request: Request, tier: str) -> int:
    """Most columns of a step."""
    if tier == "chain":
        return 1 + request.budget
    return MOST_COLUMNS if request.method is None else 1 + max(request.budget, request.config.step_budget)
