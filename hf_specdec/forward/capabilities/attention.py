"""Probes of attention for calls that return its weights, or give a decoder states to attend to besides its text."""

from typing import Any

import torch
from transformers import PreTrainedModel

from hf_specdec import compat
from hf_specdec.common.tree import DraftTree
from hf_specdec.errors import first_line
from hf_specdec.forward.capabilities.attempts import REFUSALS, Mismatch, ProbeFailed, sentence, tried
from hf_specdec.forward.capabilities.probe import known_text, runner_of
from hf_specdec.forward.capabilities.reference import tokens_of
from hf_specdec.forward.model_runner import Tier


@torch.no_grad()
def reason_against_weights(model: PreTrainedModel, tier: Tier, encoder_kwargs: dict[str, Any]) -> str | None:
    """Reason to decode calls with `output_attentions` plainly, or `None`: found by a chain of two tokens.

    Raises:
        ProbeFailed: a fault that may pass; it says nothing of the model.
    """
    try:
        tried(lambda attempt: _try_chain(model, tier, {**encoder_kwargs, "output_attentions": True}, attempt))
    except REFUSALS as error:
        return f"output_attentions of a chain of drafts cannot be taken apart: {sentence(error)}"
    return None


def _try_chain(model: PreTrainedModel, tier: Tier, kwargs: dict[str, Any], attempt: int) -> None:
    prompt, coming = tokens_of(model, attempt)
    known, tolerance = known_text(model, kwargs, prompt, coming[:2])
    target, text = runner_of(model, kwargs, prompt, tier)
    target.prefill()
    text.append(coming[0])
    target.forward([DraftTree.chain(coming[0], coming[1:3])])
    for field in ("attentions", "cross_attentions"):
        wanted = known.outputs.get(f"decoder_{field}") or known.outputs.get(field)
        found = target.shown_of(field, 0, 1)
        if _shapes(found) != _shapes(wanted):
            raise Mismatch(f"{field} are of other shapes")
        tolerance.check_states(list(found or ()), list(wanted or ()), kept_by=field)


def _shapes(layers: Any) -> list[Any]:
    return [getattr(layer, "shape", None) for layer in layers or ()]


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
