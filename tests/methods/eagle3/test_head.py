"""EAGLE-3 heads: the network against the `speculators` package, both formats on disk, errors."""

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import DynamicCache, LlamaConfig, Qwen3Config

import hf_specdec
from hf_specdec.errors import CheckpointError, ConfigError, SpecError
from hf_specdec.methods.eagle3.network import Eagle3Head, Eagle3HeadConfig, default_layer_ids, load_head, save_head

FIXTURES = Path(__file__).parents[2] / "fixtures" / "eagle3"
VARIANTS = sorted(folder.name for folder in FIXTURES.iterdir())


def rollout(head: Eagle3Head, ids: torch.Tensor, features: torch.Tensor, steps: int) -> list[torch.Tensor]:
    """The logits of training-time test: step k reads its own states and the token k places further on.

    Its queries see the text's columns up to their own and, of the later steps' columns, those of their own place.
    """
    length = len(ids)
    states, cache = head.fuse(features)[None], DynamicCache()
    causal, diagonal = torch.ones(length, length).tril().bool(), torch.eye(length).bool()
    rows = []
    for step in range(steps):
        tokens = torch.cat([ids[step:], ids.new_zeros(step)])
        mask = torch.cat([causal] + [diagonal] * step, dim=1)[None, None]
        positions = (1 + step + torch.arange(length))[None]
        # a key of step k stands in the window as its place in the text does, as in the package's mask
        places = torch.arange(length).repeat(step + 1)[None] + 1 + step
        assert head.embed_tokens is not None
        states = head(head.embed_tokens(tokens)[None], states, positions, mask, cache, key_positions=places)
        rows.append(head.logits(states)[0])
    return rows


@pytest.mark.parametrize("name", VARIANTS)
def test_a_head_computes_what_the_speculators_package_computes(name: str) -> None:
    head = load_head(FIXTURES / name)
    expected = load_file(FIXTURES / name / "expected.safetensors")
    ours = rollout(head, expected["input_ids"], expected["hidden_states"], steps=3)
    for step, rows in enumerate(ours):
        torch.testing.assert_close(rows, expected[f"logits_{step}"], atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("layer", [None, {}])
def test_a_head_without_a_description_of_its_layers_is_an_error(layer: Any, tmp_path: Path) -> None:
    """Not a network of the default sizes of a model type, which are those of a large model."""
    folder = Path(shutil.copytree(FIXTURES / VARIANTS[0], tmp_path / "head"))
    values = json.loads((folder / "config.json").read_text())
    values |= {"speculators_model_type": "eagle3", "transformer_layer_config": layer}
    (folder / "config.json").write_text(json.dumps(values))
    with pytest.raises(SpecError, match="transformer_layer_config"):
        load_head(folder)


@pytest.mark.parametrize("name", VARIANTS)
def test_a_saved_head_is_the_same_head(name: str, tmp_path: Path) -> None:
    head = load_head(FIXTURES / name)
    save_head(head, tmp_path)
    again = load_head(tmp_path)
    assert again.config.to_dict() == head.config.to_dict()
    for (key, weight), (other_key, other) in zip(head.state_dict().items(), again.state_dict().items(), strict=True):
        assert key == other_key
        assert torch.equal(weight, other)
    assert torch.equal(again.target_ids, head.target_ids)


def as_safeailab(source: Path, folder: Path, *, nested: bool) -> None:
    """The same head in the flat form: `midlayer.`, no embedding, weights as a .bin file."""
    values = json.loads((source / "config.json").read_text())
    layer = values["transformer_layer_config"]
    rope = layer.pop("rope_parameters")
    ids = values["eagle_aux_hidden_state_layer_ids"]
    flat = layer | {
        "architectures": ["LlamaForCausalLMEagle3"],
        "draft_vocab_size": values["draft_vocab_size"],
        "rope_theta": rope["rope_theta"],
        "torch_dtype": "float32",
    }
    flat |= {"eagle_config": {"eagle_aux_hidden_state_layer_ids": ids}} if nested else {}
    weights = {
        name.replace("layers.0.", "midlayer."): weight
        for name, weight in load_file(source / "model.safetensors").items()
        if not name.startswith("embed_tokens")
    }
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(flat))
    torch.save(weights, folder / "pytorch_model.bin")


@pytest.mark.parametrize("nested", [False, True])
def test_the_flat_format_gives_the_same_network(nested: bool, tmp_path: Path) -> None:
    as_safeailab(FIXTURES / "llama", tmp_path, nested=nested)
    ours, theirs = load_head(tmp_path), load_head(FIXTURES / "llama")
    assert ours.embed_tokens is None
    assert ours.config.layer_ids == ((1, 2, 3) if nested else None)
    for name, weight in ours.state_dict().items():
        assert torch.equal(weight, theirs.state_dict()[name]), name


# What the published heads' config.json files say, with the layers made small.
LLAMA = {"model_type": "llama", "hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4,
         "num_key_value_heads": 2, "num_hidden_layers": 1, "vocab_size": 128, "rms_norm_eps": 1e-5}  # fmt: skip
SCALED = {"rope_type": "llama3", "rope_theta": 500000.0, "factor": 8.0, "high_freq_factor": 4.0, "low_freq_factor": 1.0,
          "original_max_position_embeddings": 8192}  # fmt: skip
NESTED = {"speculators_model_type": "eagle3", "architectures": ["Eagle3Speculator"], "draft_vocab_size": 32,
          "speculators_config": {"algorithm": "eagle3", "verifier": {"name_or_path": "org/model"}}}  # fmt: skip
FLAT = {key: value for key, value in LLAMA.items() if key != "model_type"} | {
    "architectures": ["LlamaForCausalLMEagle3"], "draft_vocab_size": 32, "model_type": "llama"}  # fmt: skip
PUBLISHED: dict[str, dict[str, Any]] = {
    "speculators, llama": NESTED | {"transformer_layer_config": LLAMA | {"rope_parameters": SCALED}},
    "speculators, llama, norm_before_residual": NESTED
    | {"transformer_layer_config": LLAMA, "norm_before_residual": True, "target_hidden_size": None},
    "speculators, qwen3": NESTED
    | {
        "transformer_layer_config": LLAMA | {"model_type": "qwen3", "head_dim": 16},
        "eagle_aux_hidden_state_layer_ids": [2, 18, 33],
    },
    "speculators, norm_before_fc": NESTED | {"transformer_layer_config": LLAMA, "norm_before_fc": True},
    "speculators, EAGLE 3.1": NESTED | {"transformer_layer_config": LLAMA, "fc_norm": True, "norm_output": True},
    "SafeAILab": FLAT | {"rope_scaling": None, "rope_theta": 10000.0, "torch_dtype": "float16"},
    "SafeAILab, another width of the target": FLAT | {"target_hidden_size": 80},
    "SafeAILab, the whole vocabulary": FLAT | {"draft_vocab_size": 128},
    "SafeAILab, embeddings of its own": FLAT | {"rope_theta": 10000.0},
    "SGLang, scaled positions": FLAT | {"architectures": ["Eagle3LlamaForCausalLM"], "rope_scaling": SCALED},
    "SpecForge": FLAT
    | {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 17, 32], "use_aux_hidden_state": True}},
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_configurations_load_and_draft(name: str, tmp_path: Path) -> None:
    """From the files as they are published, with random weights: the network's shape, its tokens, finite logits."""
    values, has_embedding = PUBLISHED[name], "embeddings" in name
    (tmp_path / "config.json").write_text(json.dumps(values))
    state = Eagle3Head(Eagle3HeadConfig.from_dict(values), has_embedding=has_embedding).state_dict()
    size = values["draft_vocab_size"]
    if size < 128:
        state["d2t"] += 7
    renamed = {key.replace("layers.0.", "midlayer."): value for key, value in state.items()}
    save_file(renamed if "SafeAILab" in name else state, tmp_path / "model.safetensors")
    loaded = load_head(tmp_path, dtype=torch.bfloat16)
    assert loaded.dtype == torch.bfloat16
    assert loaded.fc.in_features == 3 * (values.get("target_hidden_size") or 64)
    assert (loaded.embed_tokens is not None) == has_embedding
    assert loaded.target_ids.tolist() == (list(range(128)) if size == 128 else list(range(7, 39)))
    states = loaded.fuse(torch.randn(1, 3, loaded.fc.in_features).bfloat16())
    mask, positions = torch.ones(1, 1, 3, 3).tril().bool(), torch.arange(1, 4)[None]
    states = loaded(torch.randn(1, 3, 64).bfloat16(), states, positions, mask, DynamicCache(), key_positions=positions)
    logits = loaded.logits(states)
    assert logits.shape == (1, 3, size)
    assert logits.isfinite().all()


def test_a_config_that_is_no_head_names_what_it_is(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"architectures": ["LlamaForCausalLM"]}))
    with pytest.raises(ConfigError, match=r"LlamaForCausalLMEagle3.*\['LlamaForCausalLM'\].*config\.json'"):
        load_head(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"speculators_model_type": "eagle"}))
    with pytest.raises(ConfigError, match="Did you mean 'eagle3'"):
        load_head(tmp_path)


def test_a_folder_without_a_head_says_what_is_missing(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"config\.json"):
        load_head(tmp_path)
    shutil.copy(FIXTURES / "llama" / "config.json", tmp_path)
    with pytest.raises(CheckpointError, match=r"model\.safetensors"):
        load_head(tmp_path)


@pytest.mark.parametrize("load", [load_head, hf_specdec.AutoDraftHead.from_pretrained])
@pytest.mark.parametrize("path", ["./nowhere", "a/b/nowhere"])
def test_a_folder_that_is_missing_is_no_name_on_the_hub(load: Callable[[str], Any], path: str) -> None:
    with pytest.raises(CheckpointError, match=f"`path` must be an existing folder, but there is no '{path}'"):
        load(path)


@pytest.mark.parametrize(
    "content",
    [
        "{",
        "[]",
        {"transformer_layer_config": 3},
        {"draft_vocab_size": "many"},
        {"draft_vocab_size": -5},
        {"eagle_aux_hidden_state_layer_ids": ["a"]},
        {"speculators_config": {"verifier": 3}},
    ],
    ids=str,
)
def test_a_damaged_configuration_is_named(tmp_path: Path, content: Any) -> None:
    shutil.copytree(FIXTURES / "llama", tmp_path, dirs_exist_ok=True)
    file = tmp_path / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | content) if isinstance(content, dict) else content)
    with pytest.raises(SpecError, match=re.escape(str(tmp_path / "config.json"))):
        hf_specdec.AutoDraftHead.from_pretrained(tmp_path)


def test_weights_of_another_shape_are_refused_with_both_shapes(tmp_path: Path) -> None:
    weights = load_file(FIXTURES / "llama" / "model.safetensors")
    shutil.copy(FIXTURES / "llama" / "config.json", tmp_path)
    save_file(weights | {"fc.weight": torch.zeros(16, 32)}, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"fc.weight is \(16, 32\), but config.json says \(16, 48\)"):
        load_head(tmp_path)
    weights["other.weight"] = weights.pop("norm.weight")
    save_file(weights, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"norm\.weight is missing.*other.weight is not part of such a head"):
        load_head(tmp_path)


def test_two_norms_before_fc_are_refused() -> None:
    values = NESTED | {"transformer_layer_config": LLAMA, "norm_before_fc": True, "fc_norm": True}
    with pytest.raises(ConfigError, match="fc_norm"):
        Eagle3HeadConfig.from_dict(values)


@pytest.mark.parametrize(
    ("num_layers", "ids"),
    [(1, (0, 1)), (2, (0, 1, 2)), (3, (1, 2, 3)), (6, (1, 3, 5)), (8, (2, 4, 5)), (36, (2, 18, 33))],
)
def test_default_layer_ids_are_different_and_within_the_target(num_layers: int, ids: tuple[int, ...]) -> None:
    assert default_layer_ids(num_layers) == ids


@pytest.mark.parametrize("layer_class", [LlamaConfig, Qwen3Config])
def test_gradients_reach_every_weight_of_a_head(layer_class: Any) -> None:
    layer = layer_class(**{key: value for key, value in LLAMA.items() if key != "model_type"})
    config = Eagle3HeadConfig(layer=layer, draft_vocab_size=128, target_hidden_size=64, fc_norm=True)
    head = Eagle3Head(config, has_embedding=True)
    rows = rollout(head, torch.arange(6), torch.randn(6, 192), steps=2)
    torch.stack([row.sum() for row in rows]).sum().backward()
    without = [name for name, weight in head.named_parameters() if weight.grad is None]
    assert without == []
