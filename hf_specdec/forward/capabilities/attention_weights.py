"""Compares attention weights of a token in a chain with those of a forward of the token alone."""

from typing import Any

import torch
from transformers import PreTrainedModel

from hf_specdec.common.tree import DraftTree
from hf_specdec.forward.capabilities.attempts import REFUSALS, Mismatch, sentence, tried
from hf_specdec.forward.capabilities.probe import known_text, runner_of
from hf_specdec.forward.capabilities.reference import tokens_of
from hf_specdec.forward.target.model_runner import Tier


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
