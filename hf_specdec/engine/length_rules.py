"""Whether a call can be followed where its text crosses a length at which the model changes how it computes."""

from hf_specdec import compat
from hf_specdec.compat.modules import modules_of
from hf_specdec.compat.rotary import cache_drop_length, forgets_text, has_several_positions, scaled_length
from hf_specdec.engine.call import Call
from hf_specdec.forward.target.rotary import rotary_of
from hf_specdec.request.request import Request

MOST_COLUMNS = 512  # of a step, whatever drafts: lookahead's widest windows have some hundred
HIDDEN_LENGTH = "its rotary frequencies follow the text's length, which a compiled forward hides"


def reason_against_length(call: Call, request: Request, tier: str) -> str | None:
    """Why a call is decoded plainly because of how long its texts may get, or `None`."""
    engine = request.config.engine
    if (tier == "tree" or len(call.input_ids) > 1) and scales_by_columns(call, step_columns(request, tier)):
        return "its attention goes by the columns of the cache, of which a tree or a batch has others than plain"
    length = call.facts.of(cache_drop_length, call.model)
    if length is not None and call.input_ids.shape[1] <= length < _longest(call):
        if call.facts.of(forgets_text, call.model):
            return f"the model forgets its text at {length + 1} tokens, within this text"
        kwargs = call.model_kwargs
        is_static = isinstance(kwargs.get(compat.cache_name(kwargs)), compat.StaticCache)
        is_alone = len(call.input_ids) == 1 and all(kwargs.get(name) is None for name in compat.OF_PROMPTS)
        if not is_alone or tier != "tree" or engine == "assisted" or is_static:
            return f"the model computes its cache anew at {length + 1} tokens, within this text"
    if exceeds_original_length(call):
        if engine == "assisted":
            return "its rotary frequencies follow the text's length, which transformers' assisted decoding does not"
        if compat.is_compiled(call.model):
            return HIDDEN_LENGTH
        if any(map(has_several_positions, modules_of(call.model))):
            return "its rotary frequencies follow the text's length, and a token has several positions"
    return None


def scales_by_columns(call: Call, most_columns: int = MOST_COLUMNS) -> bool:
    """Whether attention goes by the number of columns within the call's texts, or `most_columns` after them."""
    length = call.facts.of(scaled_length, call.model)
    return length is not None and _longest(call) + most_columns >= length


def step_columns(request: Request, tier: str) -> int:
    """Most columns of a step."""
    if tier == "chain":
        return 1 + request.budget
    return MOST_COLUMNS if request.method is None else 1 + max(request.budget, request.config.step_budget)


def exceeds_original_length(call: Call) -> bool:
    """Whether rotary frequencies may change within the call's texts."""
    rotary = rotary_of(call.model, call.facts)
    return rotary is not None and _longest(call) > rotary.switch


def _longest(call: Call) -> int:
    """Tokens of the longest text that the call may come to, those of earlier turns counted."""
    num_read = compat.prompt_length(call.input_ids, call.generation_config, call.model_kwargs)
    return num_read + (call.max_new_tokens or 0)
