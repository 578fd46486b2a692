"""A draft model out of the target itself: its first layers, its final norm and its head, without a weight of its own.

The copy shares every parameter, buffer and layer with the model; what is copied are the few modules that hold the list
of layers, and the configuration. Knows nothing of drafting. A model trained to leave early drafts well this way
(https://arxiv.org/abs/2404.16710); any other at least runs.

    draft = hf_specdec.self_draft(model, layers=4)
    model.generate(**inputs, spec_method="draft_model", assistant_model=draft)
"""

from typing import Any

from transformers import PreTrainedModel

from hf_specdec import compat
from hf_specdec.api.enabled_model import become_plain
from hf_specdec.engine.model_state import ATTRIBUTE
from hf_specdec.errors import UnsupportedModelError
from hf_specdec.forward.networks.layer_cut import first_layers, layers_of, path_to_layers
from hf_specdec.methods.common.config import check_positive


def self_draft(model: Any, *, layers: int) -> PreTrainedModel:
    """The model cut after its first `layers` layers, to be used as `assistant_model`; the model stays as it is.

    The draft keeps keys and values of its own. `spec_config={"exit_layer": layers}` shares the model's instead.

    Args:
        model (`PreTrainedModel`): a decoder-only transformers model; PEFT-wrapped and compiled ones too.
        layers (`int`): layers that the draft keeps, at least 1 and fewer than the model has.

    Raises:
        ConfigError: `layers` is out of range.
        UnsupportedModelError: the model's layers cannot be told from its other parts.
    """
    inner = compat.generation_model(model)
    if not isinstance(inner, PreTrainedModel):
        kind = type(inner).__name__
        raise UnsupportedModelError(
            f"`model` must be a transformers model, but is {kind}. Load it with from_pretrained."
        )
    if inner.config.is_encoder_decoder:
        raise UnsupportedModelError(
            f"{type(inner).__name__} has an encoder, and `self_draft` cuts decoder-only models. "
            "Pass a smaller model of the same kind as the draft."
        )
    path = path_to_layers(inner)
    most = len(layers_of(inner, path)) - 1
    check_positive("layers", layers, "A quarter of the model's layers is a start.", most=most)
    draft = first_layers(inner, layers, path)
    become_plain(draft)
    vars(draft).pop(ATTRIBUTE, None)  # the model's own; hooks of the shared layers stay, too
    return draft
