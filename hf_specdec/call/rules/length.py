"""Rules about lengths at which a model changes how it computes, within the texts of the call."""

from hf_specdec import compat
from hf_specdec.call.facts import Facts
from hf_specdec.call.request import Request
from hf_specdec.compat.modules import modules_of
from hf_specdec.compat.rotary import cache_drop_length, forgets_text, has_several_positions, scaled_length
from hf_specdec.engine.static_shapes import HIDDEN_LENGTH
from hf_specdec.forward.rotary import rotary_of

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
    if length is None or not facts.call.input_ids.shape[1] <= length < facts.call.longest:
        return None
    if facts.structure.of(forgets_text, facts.model):
        return f"the model forgets its text at {length + 1} tokens, within this text"
    is_alone = facts.num_rows == 1 and all(facts.kwargs.get(name) is None for name in compat.OF_PROMPTS)
    is_static = isinstance(facts.cache, compat.StaticCache)
    if not is_alone or facts.tier != "tree" or request.is_assisted or is_static:
        return f"the model computes its cache anew at {length + 1} tokens, within this text"
    return None


def rotary_frequencies(facts: Facts, request: Request) -> str | None:
    """Rotary frequencies change within the text."""
    if not exceeds_original_length(facts):
        return None
    if request.is_assisted:
        return "its rotary frequencies follow the text's length, which transformers' assisted decoding does not"
    if compat.is_compiled(facts.model):
        return HIDDEN_LENGTH
    if any(map(has_several_positions, modules_of(facts.model))):
        return "its rotary frequencies follow the text's length, and a token has several positions"
    return None


def scales_by_columns(facts: Facts, most_columns: int = MOST_COLUMNS) -> bool:
    """Returns whether attention goes by the number of columns within the call's texts, or `most_columns` after them."""
    length = facts.structure.of(scaled_length, facts.model)
    return length is not None and facts.call.longest + most_columns >= length


def exceeds_original_length(facts: Facts) -> bool:
    """Returns whether rotary frequencies may change within the call's texts."""
    rotary = rotary_of(facts.model, facts.structure)
    return rotary is not None and facts.call.longest > rotary.switch


def _step_columns(request: Request, tier: str) -> int:
    """Most columns of a step."""
    if tier == "chain":
        return 1 + request.budget
    return MOST_COLUMNS if request.method is None else 1 + max(request.budget, request.config.step_budget)
