"""Shapes of draft heads that are made of transformers' decoder layers, as config.json files describe them.

A head is published in two forms: that of speculators (`speculators_model_type`) nests the layers' configuration, that
of its authors is the layers' flat one with an architecture's name. Subclasses read what differs.
"""

from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Self

from transformers import PretrainedConfig

from hf_specdec.errors import ConfigError, unknown_name

OF_A_MODEL = ("architectures", "transformers_version", "_name_or_path", "torch_dtype", "dtype")
REMEDY = "Take config.json as it was published, or another head."
MOST_DRAFT_TOKENS = 32_000  # of heads in the form of speculators that do not say how many


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadShape:
    """A head's shape.

    Args:
        layer (`PretrainedConfig`): of the decoder layers, llama or qwen3; its `vocab_size` is the target's.
        draft_vocab_size (`int`): tokens that the head can draft.
        target_hidden_size (`int`): width of one hidden state of the target.
        layer_ids (`tuple[int, ...]`, *optional*): hidden states that the head reads, as `output_hidden_states` numbers
            them: 0 the embeddings, n the last one. `None` is the default for the target's number of layers.

    Attributes:
        label (`str`): of such heads, for messages.
        kinds (`tuple[str, ...]`): values of `speculators_model_type`.
        architectures (`Mapping[str, str]`): names of the authors' form, and what each stands for.
        ids_field (`str`): field of config.json with `layer_ids`.
    """

    layer: PretrainedConfig
    draft_vocab_size: int
    target_hidden_size: int
    layer_ids: tuple[int, ...] | None = None

    label: ClassVar[str]
    kinds: ClassVar[tuple[str, ...]]
    architectures: ClassVar[Mapping[str, str]]
    ids_field: ClassVar[str]

    def __post_init__(self) -> None:
        if not 0 < self.draft_vocab_size <= self.vocab_size:
            rule = f"must be from 1 to the target's vocab_size {self.vocab_size}"
            raise ConfigError("draft_vocab_size", rule, self.draft_vocab_size, REMEDY)
        ids = self.layer_ids
        if ids is not None and (not ids or min(ids) < 0 or len(set(ids)) != len(ids)):
            raise ConfigError(self.ids_field, "must be different numbers from 0 on", ids, REMEDY)

    @property
    def vocab_size(self) -> int:
        """Tokens of the target."""
        return int(self.layer.vocab_size)

    @property
    def hidden_size(self) -> int:
        """Width of the head's states."""
        return int(self.layer.hidden_size)

    @property
    def num_features(self) -> int:
        """Number of hidden states of the target that are concatenated."""
        return 3 if self.layer_ids is None else len(self.layer_ids)

    @classmethod
    def describes(cls, values: Mapping[str, Any]) -> bool:
        """True if a config.json is that of such a head."""
        return values.get("speculators_model_type") in cls.kinds or cls._architecture(values) is not None

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Self:
        """Read a config.json.

        Raises:
            ConfigError: it describes no such head, or one of a kind that is not known.
        """
        kind, name = values.get("speculators_model_type"), cls._architecture(values)
        if kind is not None:
            if kind not in cls.kinds:
                raise unknown_name("speculators_model_type", kind, cls.kinds)
            layer = values.get("transformer_layer_config")
            if not layer:  # the sizes would be transformers' defaults, those of a large model
                raise ConfigError("transformer_layer_config", "must be that of the head's layers", layer, REMEDY)
            return cls._from_speculators(values, kind, dict(layer))
        if name is None:
            kinds = " or ".join(cls.kinds)
            rule = f"must name {' or '.join(cls.architectures)}, or speculators_model_type must be {kinds}"
            remedy = f"Choose the folder of {cls.label}."
            raise ConfigError("architectures", rule, values.get("architectures"), remedy)
        return cls._from_flat(values, cls.architectures[name])

    @classmethod
    @abstractmethod
    def _from_speculators(cls, values: Mapping[str, Any], kind: str, layer: dict[str, Any]) -> Self:
        """Read the form of speculators; `layer` are the values of the layers' configuration."""

    @classmethod
    @abstractmethod
    def _from_flat(cls, values: Mapping[str, Any], kind: str) -> Self:
        """Read the authors' form; `kind` is what the architecture's name stands for."""

    @classmethod
    def _architecture(cls, values: Mapping[str, Any]) -> str | None:
        return next((name for name in values.get("architectures") or [] if name in cls.architectures), None)


def sizes_of(values: Mapping[str, Any], layer: PretrainedConfig, draft_vocab_size: int) -> dict[str, Any]:
    """Fields of a `HeadShape` that all forms name alike.

    Args:
        draft_vocab_size: where the file does not say.
    """
    return {
        "layer": layer,
        "draft_vocab_size": values.get("draft_vocab_size") or draft_vocab_size,
        "target_hidden_size": values.get("target_hidden_size") or layer.hidden_size,
    }


def layer_values(config: PretrainedConfig) -> dict[str, Any]:
    """Values of the layers' configuration for a config.json, without those of a whole model."""
    return {name: value for name, value in config.to_dict().items() if name not in OF_A_MODEL and not callable(value)}
