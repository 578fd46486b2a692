"""Rules about what the model reads besides token ids: masks, images, encoded states."""

from hf_specdec import compat
from hf_specdec.call.facts import Facts
from hf_specdec.call.request import Request


def shared_states(facts: Facts, request: Request) -> str | None:
    """A decoder attends to images or states that the caller passes."""
    if compat.sees_images(facts.model, facts.kwargs) and facts.kwargs.get("cross_attention_mask") is None:
        return "without a cross_attention_mask several tokens see less of an image than one does"
    states = compat.given_states(facts.model, facts.kwargs)
    return facts.found.states_reason(facts.model, states) if states else None


def attention_output(facts: Facts, request: Request) -> str | None:
    """Attention is returned of a loop, a cache or a model that shows other columns than the text's."""
    config = facts.call.generation_config
    if not (config.output_attentions and config.return_dict_in_generate):
        return None
    if request.is_assisted:
        return "output_attentions shows other columns in transformers' assisted decoding"
    if facts.has_static_cache:
        return "output_attentions shows the free columns of a static cache"
    if compat.sees_images(facts.model, facts.kwargs):
        return "output_attentions shows layers that attend to an image's columns"
    return facts.found.attention_reason(facts.model, facts.encoder_kwargs)


def decoder_mask(facts: Facts, request: Request) -> str | None:
    """A mask of the decoder hides tokens from chains."""
    mask = facts.kwargs.get("decoder_attention_mask")
    if mask is not None and facts.tier == "chain" and not bool(mask.all()):
        return "its decoder_attention_mask hides tokens, which forwards of one token may see and those of several not"
    return None


def padded_text(facts: Facts, request: Request) -> str | None:
    """A single text's mask hides tokens from trees; chains go by the model's own mask."""
    if facts.num_rows > 1 or request.is_assisted or facts.tier != "tree" or not facts.call.is_padded:
        return None
    reason = facts.batch_reason()
    return None if reason is None else f"its attention_mask hides tokens, and {reason}"


def foreign_inputs(facts: Facts, request: Request) -> str | None:
    """Code from outside of transformers may prepare other inputs at any length of the text."""
    if (facts.num_rows > 1 or facts.has_static_cache) and compat.has_foreign_inputs(facts.model):
        return "code of its own prepares its inputs, which is followed for one sequence over a dynamic cache"
    return None
