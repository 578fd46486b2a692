"""Rules about prompts that share a batch: which jobs have none, and which prompts are decoded alone.

In a shared batch a forward takes nothing of a sequence but ids and positions, counted from 0; the cache changes its
shape, and is not returned.
"""

from typing import Any

import torch
from transformers import StaticCache

from hf_specdec.call.request import Request
from hf_specdec.call.rules.inputs import repeated_text
from hf_specdec.call.rules.model import ONE_SEQUENCE, OWN_LOOP, foreign_code, rotary_frequencies, scaled_attention
from hf_specdec.compat.caches import is_users_own
from hf_specdec.compat.generation import has_foreign_inputs, has_own_input_preparation, has_own_loop
from hf_specdec.compat.models import reads_prompts
from hf_specdec.forward.forward_arguments import tensors_of

SEQUENCE_TENSORS = ("attention_mask", "position_ids")  # of a prompt alone, all ones and a count


def one_by_one(wrapper: Any, request: Request) -> str | None:
    """Reason to decode prompts of different lengths one by one; `None` where they can share a batch.

    Args:
        wrapper: the model as the caller has it, perhaps in PEFT's.
    """
    model = request.model
    if reads_prompts(wrapper):
        return "PEFT's wrapper puts virtual tokens before each prompt, or looks in it for where its adapter begins"
    if has_own_loop(model):
        return OWN_LOOP
    if request.is_assisted:
        return ONE_SEQUENCE
    if model.config.is_encoder_decoder:
        return "its decoder reads an encoding of each prompt"
    if has_own_input_preparation(model) or has_foreign_inputs(model):
        return "its class prepares the inputs of each forward itself"
    if (reason := foreign_code(request)) is not None:
        return reason
    return request.probed.capability.reason if request.tier != "tree" else request.batch_reason()


def alone(request: Request) -> str | None:
    """Reason to decode one prompt among others by itself; `None` where it can share their batch."""
    if request.is_assisted:
        return ONE_SEQUENCE
    if (reason := repeated_text(request)) is not None:
        return reason
    cache, ids = request.call.cache, request.call.input_ids
    if isinstance(cache, StaticCache) or is_users_own(cache):
        return f"it has a {type(cache).__name__} of its own"
    if rotary_frequencies(request) is not None:
        return "its rotary frequencies follow the length of its text"
    if (reason := scaled_attention(request)) is not None:
        return reason
    others = [name for name in tensors_of(request.kwargs) if name not in SEQUENCE_TENSORS]
    if others:
        return f"its forward takes {others[0].partition('.')[0]}"
    mask, positions = request.kwargs.get("attention_mask"), request.kwargs.get("position_ids")
    if mask is not None and not bool(mask.all()):
        return "its attention_mask hides tokens"
    count = torch.arange(ids.shape[1], device=ids.device)
    if positions is not None and (positions.shape[-1] != len(count) or not bool((positions == count).all())):
        return "its position_ids do not count from 0"
    return None
