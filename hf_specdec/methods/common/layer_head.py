"""Draft heads that are made of transformers' decoder layers: their shapes, their common parts, and how files hold them.

A head is published in two forms: that of speculators (`speculators_model_type`) nests the layers' configuration, that
of its authors is the layers' flat one with an architecture's name. Subclasses read what differs.
"""

import os
from abc import abstractmethod
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Self

import torch
from torch import nn
from transformers import PretrainedConfig

from hf_specdec.compat.decoder_layers import LAYERS, config_of_layers
from hf_specdec.errors import ConfigError, unknown_name
from hf_specdec.methods.common.draft_head import DraftHead, attention_shape
from hf_specdec.methods.common.head_files import HeadFiles

OF_A_MODEL = ("architectures", "transformers_version", "_name_or_path", "torch_dtype", "dtype")
REMEDY = "Take config.json as it was published, or another head."
MOST_DRAFT_TOKENS = 32_000  # of heads in the form of speculators that do not say how many
# of the target, which the training code keeps with the head; `d2t` says what `t2d` does
OF_THE_TARGET = ("verifier_lm_head.", "verifier_norm.", "rotary_emb.", "t2d")


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


class LayerHead(DraftHead):
    """A head with a projection of the target's hidden states, decoder layers, a norm and an output head.

    Args:
        config: its shape.
        has_embedding: whether it brings token embeddings; else it reads the target's.
        has_output_head: whether it brings an output head; else the target's reads its states.

    Attributes:
        embed_tokens (`nn.Embedding | None`): `(vocab_size, hidden_size)`.
        d2t (`Tensor | None`): `(draft_vocab_size,)`, what is added to a draft id to make it the target's; `None` where
            both vocabularies are the same.
        shape_class (`type[HeadShape]`): of `config`.
        parts (`Mapping[str, str]`): arguments of the class for parts that not every head has, and a weight of each.
    """

    shape_class: ClassVar[type[HeadShape]]
    parts: ClassVar[Mapping[str, str]] = {"has_embedding": "embed_tokens.weight"}

    config: Any
    d2t: torch.Tensor | None
    lm_head: Any

    def __init__(self, config: HeadShape, *, has_embedding: bool = False, has_output_head: bool = True) -> None:
        super().__init__()
        self.config = config
        layer_config = config_of_layers(config.layer)
        layer_class, norm_class, rotary_class = LAYERS[layer_config.model_type]
        size, num_layers = config.hidden_size, layer_config.num_hidden_layers
        self.vocab_size, self.hidden_size, self.num_layers = config.vocab_size, size, num_layers
        self.target_hidden_size = config.target_hidden_size
        self.embed_tokens = nn.Embedding(config.vocab_size, size) if has_embedding else None
        self.fc = nn.Linear(config.num_features * config.target_hidden_size, size, bias=False)
        self.layers = nn.ModuleList([layer_class(layer_config, number) for number in range(num_layers)])
        self.norm = norm_class(size, eps=layer_config.rms_norm_eps)
        self.lm_head = nn.Linear(size, config.draft_vocab_size, bias=False) if has_output_head else None
        self.rotary_emb = rotary_class(layer_config)
        is_reduced = config.draft_vocab_size < config.vocab_size
        self.register_buffer("d2t", torch.zeros(config.draft_vocab_size, dtype=torch.long) if is_reduced else None)

    @classmethod
    def for_weights(cls, config: HeadShape, names: Collection[str]) -> Self:
        """A new head of this shape with the parts that weights of these names are of."""
        return cls(config, **{argument: weight in names for argument, weight in cls.parts.items()})

    @classmethod
    def read(cls, path: str | os.PathLike[str], *, dtype: torch.dtype | None = None, **hub: Any) -> Self:
        """Read a head in one of the published forms from a folder or from the Hugging Face hub.

        Args:
            path: a folder, or a name on the hub.
            dtype: of the weights; by default that of the file.
            hub: `revision`, `token`, `cache_dir`, `local_files_only`, ... as in transformers.

        Raises:
            CheckpointError: something is missing or damaged.
            ConfigError: config.json describes no such head.
        """
        files = HeadFiles(path, hub)
        with files.describing_a_head():
            config = cls.shape_class.from_dict(files.values())
        weights = {cls.weight_name(name): weight for name, weight in files.weights().items()} | cls.more_weights(files)
        with files.describing_a_head():
            head = cls.for_weights(config, weights)
        unread = (*OF_THE_TARGET, "d2t") if head.d2t is None else OF_THE_TARGET
        loaded = {name: weight for name, weight in weights.items() if not name.startswith(unread)}
        files.fill(head, loaded, dtype=dtype)
        return head

    @staticmethod
    def weight_name(name: str) -> str:
        """Name of a file's weight in the head."""
        return name.removeprefix("model.")

    @staticmethod
    def more_weights(files: HeadFiles) -> dict[str, torch.Tensor]:
        """Weights in further files of the folder."""
        return {}

    def like(self, config: HeadShape) -> Self:
        """A new head of another shape with the parts that this one has."""
        return self.for_weights(config, self.state_dict().keys())

    @property
    def layer_shapes(self) -> dict[int, tuple[int, int, int]]:
        """Key/value heads, key size and value size of each layer."""
        return dict.fromkeys(range(self.num_layers), attention_shape(self.config.layer))

    @property
    def target_ids(self) -> torch.Tensor | None:
        """`(draft_vocab_size,)`: the target's id of each draft id; `None` where both are the same."""
        return None if self.d2t is None else torch.arange(len(self.d2t), device=self.d2t.device) + self.d2t

    def set_target_ids(self, ids: torch.Tensor) -> None:
        """Draft the tokens `ids`, `(draft_vocab_size,)` of the target's, ascending."""
        assert self.d2t is not None
        self.d2t.copy_(ids - torch.arange(len(ids), device=ids.device))
