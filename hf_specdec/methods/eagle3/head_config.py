"""Configuration of an EAGLE-3 head, read from either of its published forms.

Both forms describe the same network: the speculators format (`speculators_model_type: "eagle3"`) nests the layer's
configuration, the SafeAILab and SpecForge format (`architectures: ["LlamaForCausalLMEagle3"]`) is a flat one, as is
that of DeepSpec (`["Qwen3Eagle3Model"]`).
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from transformers import PretrainedConfig

from hf_specdec.compat.decoder_layers import CONFIGS
from hf_specdec.errors import ConfigError, unknown_name
from hf_specdec.methods.common.head_files import layer_values

FLAT_ARCHITECTURES = {  # -> model type of the layers
    "LlamaForCausalLMEagle3": "llama",
    "Eagle3LlamaForCausalLM": "llama",
    "Qwen3Eagle3Model": "qwen3",
}
FLAGS = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")


@dataclass(frozen=True, slots=True, kw_only=True)
class Eagle3HeadConfig:
    """An EAGLE-3 head's shape.

    Args:
        layer (`PretrainedConfig`): of the decoder layers, llama or qwen3; its `vocab_size` is the target's.
        draft_vocab_size (`int`): tokens that the head can draft.
        target_hidden_size (`int`): width of one hidden state of the target.
        layer_ids (`tuple[int, ...]`, *optional*): hidden states that the head reads, as `output_hidden_states` numbers
            them: 0 the embeddings, n the last one. `None` is the default for the target's number of layers.
        norm_before_residual (`bool`): the first residual is the normalised state.
        norm_before_fc (`bool`): one norm over the concatenated hidden states.
        fc_norm (`bool`): a norm for each hidden state before they are concatenated.
        norm_output (`bool`): the normalised state is what the next draft step reads.
        target_name (`str`, *optional*): of the target that the head was trained for.
        target_architectures (`tuple[str, ...]`): of that target.
    """

    layer: PretrainedConfig
    draft_vocab_size: int
    target_hidden_size: int
    layer_ids: tuple[int, ...] | None = None
    norm_before_residual: bool = False
    norm_before_fc: bool = False
    fc_norm: bool = False
    norm_output: bool = False
    target_name: str | None = None
    target_architectures: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.norm_before_fc and self.fc_norm:
            raise ConfigError("fc_norm", "must be False with norm_before_fc", True, "A head has one of the two norms.")
        if self.draft_vocab_size > self.vocab_size:
            rule = f"must be at most the target's vocab_size {self.vocab_size}"
            raise ConfigError("draft_vocab_size", rule, self.draft_vocab_size, "Correct the head's config.json.")
        ids = self.layer_ids
        if ids is not None and (not ids or min(ids) < 0 or len(set(ids)) != len(ids)):
            rule = "must be different numbers from 0 on"
            raise ConfigError("eagle_aux_hidden_state_layer_ids", rule, ids, "Correct the head's config.json.")

    def get_text_config(self) -> PretrainedConfig:
        """Refuses a head in transformers' pipelines, which ask an `assistant_model` for this; a head has none.

        Raises:
            ConfigError: always; the remedy is where a pipeline takes a head.
        """
        rule = "must be a transformers model where transformers.pipeline is made"
        remedy = "Pass the head in each call, pipe(text, assistant_model=head, spec_method=...), or use"
        raise ConfigError("assistant_model", rule, "a draft head", f"{remedy} hf_specdec.pipeline, which takes it.")

    @property
    def vocab_size(self) -> int:
        """Tokens of the target."""
        size: int = self.layer.vocab_size
        return size

    @property
    def hidden_size(self) -> int:
        """Width of the head's own states."""
        size: int = self.layer.hidden_size
        return size

    @property
    def num_features(self) -> int:
        """Number of hidden states of the target that are concatenated."""
        return 3 if self.layer_ids is None else len(self.layer_ids)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> "Eagle3HeadConfig":
        """Read a config.json.

        Raises:
            ConfigError: it describes no EAGLE-3 head, or one of a kind that is not known.
        """
        kind = values.get("speculators_model_type")
        if kind is not None:
            if kind != "eagle3":
                raise unknown_name("speculators_model_type", kind, ["eagle3"])
            return cls._from_speculators(values)
        architectures = values.get("architectures") or []
        if not set(architectures) & set(FLAT_ARCHITECTURES):
            raise ConfigError(
                "architectures",
                f"must name {' or '.join(FLAT_ARCHITECTURES)}, or speculators_model_type must be eagle3",
                architectures,
                "Choose the folder of an EAGLE-3 head.",
            )
        return cls._from_flat(values)

    @classmethod
    def _from_speculators(cls, values: Mapping[str, Any]) -> "Eagle3HeadConfig":
        layer = values.get("transformer_layer_config")
        if not layer:  # the sizes would be transformers' defaults, those of a large model
            rule = "must be the configuration of the head's layers"
            raise ConfigError("transformer_layer_config", rule, layer, "Take config.json as it was published.")
        layer = dict(layer)
        model_type = layer.pop("model_type", "qwen3")
        if model_type not in CONFIGS:
            raise unknown_name("transformer_layer_config.model_type", model_type, CONFIGS)
        config = CONFIGS[model_type](**layer)
        verifier = (values.get("speculators_config") or {}).get("verifier") or {}
        ids = values.get("eagle_aux_hidden_state_layer_ids")
        return cls(
            layer=config,
            draft_vocab_size=values.get("draft_vocab_size") or 32000,
            target_hidden_size=values.get("target_hidden_size") or config.hidden_size,
            layer_ids=None if ids is None else tuple(ids),
            target_name=verifier.get("name_or_path"),
            target_architectures=tuple(verifier.get("architectures") or ()),
            **{name: bool(values.get(name)) for name in FLAGS},
        )

    @classmethod
    def _from_flat(cls, values: Mapping[str, Any]) -> "Eagle3HeadConfig":
        own = {"architectures", "model_type", "draft_vocab_size", "target_hidden_size", "eagle_config", "auto_map"}
        model_type = next(FLAT_ARCHITECTURES[name] for name in values["architectures"] if name in FLAT_ARCHITECTURES)
        config = CONFIGS[model_type](**{"num_hidden_layers": 1} | {k: v for k, v in values.items() if k not in own})
        nested = values.get("eagle_config") or {}
        flags: dict[str, Any] = {name: bool(values.get(name) or nested.get(name)) for name in FLAGS}
        ids = nested.get("eagle_aux_hidden_state_layer_ids") or values.get("eagle_aux_hidden_state_layer_ids")
        if ids is None and "target_layer_ids" in values:
            ids = [layer + 1 for layer in values["target_layer_ids"]]  # it counts layers from 0
        return cls(
            layer=config,
            draft_vocab_size=values.get("draft_vocab_size") or config.vocab_size,
            target_hidden_size=values.get("target_hidden_size") or config.hidden_size,
            layer_ids=None if ids is None else tuple(ids),
            **flags,
        )

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


def is_head_config(values: Mapping[str, Any]) -> bool:
    """True if a config.json is that of an EAGLE-3 head."""
    architectures = values.get("architectures") or []
    return values.get("speculators_model_type") == "eagle3" or bool(set(architectures) & set(FLAT_ARCHITECTURES))


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
