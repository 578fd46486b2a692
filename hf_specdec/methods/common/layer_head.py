"""Draft heads that are made of transformers' decoder layers: their common parts, and how these are read from files."""

import os
from collections.abc import Collection, Mapping
from typing import Any, ClassVar, Self, TypeVar

import torch
from torch import nn

from hf_specdec.compat.decoder_layers import LAYERS, config_of_layers
from hf_specdec.methods.common.draft_head import DraftHead, attention_shape
from hf_specdec.methods.common.head_files import HeadFiles
from hf_specdec.methods.common.head_shape import HeadShape

# of the target, which the training code keeps with the head; `d2t` says what `t2d` does
OF_THE_TARGET = ("verifier_lm_head.", "verifier_norm.", "rotary_emb.", "t2d")

Shape = TypeVar("Shape", bound=HeadShape)


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
