"""Rules about what the model reads besides token ids: masks, images, encoded states."""

from hf_specdec import compat
from hf_specdec.call.facts import Facts
from hf_specdec.call.request import Request


def shared_states(facts: Facts, request: Request) -> str | None:
    """A decoder attends to images or states that the caller passes."""
    if compat.sees_images(facts.model, facts.kwargs) and facts.kwargs.get("cross_attention_mask") is None:
        return "without a cross_attention_mask several tokens see less of an image than one does"
    states = compat.given_states(facts.model, facts.kwargs)
    return f"its decoder attends to {next(iter(states))} besides its text" if states else None


def attention_output(facts: Facts, request: Request) -> str | None:
    """Attention weights are returned, of each token alone."""
    is_shown = facts.call.generation_config.output_attentions
    return "output_attentions shows the weights of each token's own forward" if is_shown else None


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
