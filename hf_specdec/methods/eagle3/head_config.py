"""Shape of an EAGLE-3 head, read from any of its published forms.

They describe the same network: that of speculators, and the flat one of SafeAILab and SpecForge
(`architectures: ["LlamaForCausalLMEagle3"]`).
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Self

from hf_specdec.compat.decoder_layers import CONFIGS
from hf_specdec.errors import ConfigError, unknown_name
from hf_specdec.methods.common.layer_head import MOST_DRAFT_TOKENS, HeadShape, layer_values, sizes_of

FLAGS = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")
NOT_OF_LAYERS = {"architectures", "model_type", "draft_vocab_size", "target_hidden_size", "eagle_config", "auto_map"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Eagle3HeadConfig(HeadShape):
    """An EAGLE-3 head's shape.

    Further arguments are those of `HeadShape`.

    Args:
        norm_before_residual (`bool`): the first residual is the normalised state.
        norm_before_fc (`bool`): one norm over the concatenated hidden states.
        fc_norm (`bool`): a norm for each hidden state before they are concatenated.
        norm_output (`bool`): the normalised state is what the next draft step reads.
        target_name (`str`, *optional*): of the target that the head was trained for.
        target_architectures (`tuple[str, ...]`): of that target.
    """

    norm_before_residual: bool = False
    norm_before_fc: bool = False
    fc_norm: bool = False
    norm_output: bool = False
    target_name: str | None = None
    target_architectures: tuple[str, ...] = ()

    label: ClassVar[str] = "an EAGLE-3 head"
    kinds: ClassVar[tuple[str, ...]] = ("eagle3",)
    architectures: ClassVar[Mapping[str, str]] = {  # -> model type of the layers
        "LlamaForCausalLMEagle3": "llama",
        "Eagle3LlamaForCausalLM": "llama",
    }
    ids_field: ClassVar[str] = "eagle_aux_hidden_state_layer_ids"

    def __post_init__(self) -> None:
        HeadShape.__post_init__(self)
        if self.norm_before_fc and self.fc_norm:
            raise ConfigError("fc_norm", "must be False with norm_before_fc", True, "A head has one of the two norms.")

    @classmethod
    def _from_speculators(cls, values: Mapping[str, Any], kind: str, layer: dict[str, Any]) -> Self:
        model_type = layer.pop("model_type", "qwen3")
        if model_type not in CONFIGS:
            raise unknown_name("transformer_layer_config.model_type", model_type, CONFIGS)
        verifier = (values.get("speculators_config") or {}).get("verifier") or {}
        ids = values.get(cls.ids_field)
        return cls(
            **sizes_of(values, CONFIGS[model_type](**layer), MOST_DRAFT_TOKENS),
            layer_ids=None if ids is None else tuple(ids),
            target_name=verifier.get("name_or_path"),
            target_architectures=tuple(verifier.get("architectures") or ()),
            **{name: bool(values.get(name)) for name in FLAGS},
        )

    @classmethod
    def _from_flat(cls, values: Mapping[str, Any], kind: str) -> Self:
        of_layers = {name: value for name, value in values.items() if name not in NOT_OF_LAYERS}
        layer = CONFIGS[kind](**{"num_hidden_layers": 1} | of_layers)
        fields = {**values, **(values.get("eagle_config") or {})}
        ids = fields.get(cls.ids_field)
        flags: dict[str, Any] = {name: bool(fields.get(name)) for name in FLAGS}
        sizes = sizes_of(values, layer, layer.vocab_size)
        return cls(**sizes, layer_ids=None if ids is None else tuple(ids), **flags)

    def to_dict(self) -> dict[str, Any]:
        """The config.json of the speculators format, which vLLM reads too."""
        verifier = {"name_or_path": self.target_name, "architectures": list(self.target_architectures)}
        proposal = {"proposal_type": "greedy", "speculative_tokens": 3, "verifier_accept_k": 1, "accept_tolerance": 0.0}
        return {
            "architectures": ["Eagle3DraftModel"],
            "speculators_model_type": "eagle3",
            "speculators_config": {
                "algorithm": "eagle3",
                "default_proposal_method": "greedy",
                "proposal_methods": [proposal],
                "verifier": verifier,
            },
            "transformer_layer_config": layer_values(self.layer),
            "draft_vocab_size": self.draft_vocab_size,
            "target_hidden_size": None if self.target_hidden_size == self.hidden_size else self.target_hidden_size,
            "eagle_aux_hidden_state_layer_ids": None if self.layer_ids is None else list(self.layer_ids),
            **{name: getattr(self, name) for name in FLAGS},
            "tie_word_embeddings": False,
        }


def default_layer_ids(num_layers: int) -> tuple[int, ...]:
    """A low, a middle and a high hidden state of a target with `num_layers` layers.

    Heads whose files name none read 2, n // 2 and n - 3, which needs 8 layers. Smaller targets, for which no head is
    published, give 1, n // 2 and n - 1, and those of up to three layers their last three hidden states.
    """
    if num_layers >= 8:
        return 2, num_layers // 2, num_layers - 3
    if num_layers >= 4:
        return 1, num_layers // 2, num_layers - 1
    return tuple(range(max(num_layers - 2, 0), num_layers + 1))
