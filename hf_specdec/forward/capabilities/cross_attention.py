"""Probes whether a decoder keeps the keys and values of states that it is given apart from those of its text."""

import torch
from transformers import PreTrainedModel

from hf_specdec import compat
from hf_specdec.errors import first_line
from hf_specdec.forward.capabilities.attempts import ProbeFailed


@torch.no_grad()
def reason_against_states(model: PreTrainedModel, states: dict[str, torch.Tensor]) -> str | None:
    """Reason to decode calls with `compat.given_states` plainly, or `None`: found by a forward of one token.

    GPT-2 and BLIP put an `EncoderDecoderCache` around the cache that `generate` makes. Decoders such as Bart's write
    keys of the states into it in every step; plain `generate`'s text is then another than that without a cache.

    Raises:
        ProbeFailed: the forward did, as plain generation's may.
    """
    ids = torch.zeros((1, 1), dtype=torch.long, device=compat.input_device(model))
    cache = compat.DynamicCache(config=compat.text_config(model.config))
    (name, given), *_ = states.items()
    shown = {name: given[:1] if name == "encoder_hidden_states" else (given[:1],)}
    try:
        outputs = model(input_ids=ids, **shown, use_cache=True, **{compat.CACHE: cache}, return_dict=True)
    except Exception as error:
        raise ProbeFailed(f"next to {name} it could not be tried: {first_line(error)}") from error
    kept = outputs.get(compat.CACHE)
    if isinstance(kept, compat.EncoderDecoderCache) and compat.cached_length(kept) == 1:
        return None
    return f"its self- and cross-attention share one DynamicCache next to {name}"
