"""Whether a decoder that is given `encoder_hidden_states` keeps what it makes of them apart from its text."""

import torch
from transformers import PreTrainedModel

from hf_specdec import compat
from hf_specdec.errors import first_line

__all__ = ["reason_against_states"]

SHARED = "its self- and cross-attention share one DynamicCache beside encoder_hidden_states"


@torch.no_grad()
def reason_against_states(model: PreTrainedModel, states: torch.Tensor) -> str | None:
    """Why calls with `encoder_hidden_states` are decoded plainly, or `None`: found by a forward of one token.

    GPT-2 and BLIP put an `EncoderDecoderCache` around the cache that `generate` makes. Decoders such as Bart's write
    keys of the states into it in every step; plain `generate`'s text is then another than that without a cache.

    Args:
        states: `(batch, length, hidden_size)`.
    """
    ids = torch.zeros((1, 1), dtype=torch.long, device=compat.input_device(model))
    cache = compat.DynamicCache(config=compat.text_config(model.config))
    arguments = {"input_ids": ids, "encoder_hidden_states": states[:1], "use_cache": True, compat.CACHE: cache}
    try:
        kept = model(**arguments, return_dict=True).get(compat.CACHE)
    except Exception as error:  # noqa: BLE001 of the model's own code
        return f"beside encoder_hidden_states it could not be tried: {first_line(error)}"
    return None if isinstance(kept, compat.EncoderDecoderCache) and compat.cached_length(kept) == 1 else SHARED
