"""Gemma 4's assistants: how to load one, and which layers of a target they read.

Names                              Why
`kv_sharing_modes`                 raises in transformers 5.23 for a configuration of shared layers only, which every
                                   assistant has; a subclass of the configuration says what holds
`num_kv_shared_layers`             layers at a model's end that read the keys of earlier ones

Tried with transformers 5.23 and 5.24.
"""

from collections.abc import Mapping
from typing import Any

from transformers import PreTrainedModel

from hf_specdec.compat.models import text_config


def with_shared_layers(config: Any) -> Any:
    """An assistant's configuration whose layers all read keys of the target; changed in place, and returned."""
    text = text_config(config)
    try:
        text.kv_sharing_modes  # noqa: B018 a property that may raise
    except ValueError:
        own = type(text)
        modes = property(lambda self: ["reuse"] * self.num_hidden_layers)
        # transformers finds a model's class by the name of its configuration's
        text.__class__ = type(own.__name__, (own,), {"kv_sharing_modes": modes, "__module__": own.__module__})
    return config


def last_own_layers(target: PreTrainedModel) -> dict[str, int]:
    """The last layer of each type that has keys of its own, by type; empty where layers have no types."""
    config = text_config(target.config)
    types = list(getattr(config, "layer_types", None) or ())
    own = types[: len(types) - int(getattr(config, "num_kv_shared_layers", None) or 0)]
    return {kind: number for number, kind in enumerate(own)}


def heads_of_layers(config: Any, layers: Mapping[str, int]) -> dict[str, tuple[int, int]]:
    """Key/value heads and their size of some layers, by type."""
    text = text_config(config)
    found = {}
    for kind, number in layers.items():
        layer = text.per_layer_config[number] if getattr(text, "per_layer_config", None) is not None else text
        found[kind] = (int(layer.num_key_value_heads), int(layer.head_dim))
    return found
