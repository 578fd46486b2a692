"""Tiny random models with MTP layers, and checkpoints that hold both."""

import json
from pathlib import Path
from typing import Any

import torch
import transformers as tf
from safetensors.torch import load_file, save_file
from transformers.modeling_layers import MtpModel

import hf_specdec
from hf_specdec.methods.mtp.network import MtpHead
from tests.helpers.zoo import DECODER, LATENT, WINDOW

__all__ = ["TARGETS", "build_target", "fitted_mtp", "random_mtp", "random_mtp_head", "save_checkpoint"]
EXPERTS: dict[str, Any] = {
    "moe_intermediate_size": 32,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "head_dim": 12,
}
MELLUM: dict[str, Any] = {
    "moe_intermediate_size": 32,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "head_dim": 12,
    "sliding_window": WINDOW,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    "mlp_layer_types": ["sparse"] * 3,
    "mtp_layer_types": ["sliding_attention"],
    "mtp_mlp_layer_types": ["sparse"],
}
# configuration class, options, MTP layers
TARGETS: dict[str, tuple[str, dict[str, Any], int]] = {
    "glm4_moe, 1 layer": ("Glm4MoeConfig", DECODER | EXPERTS, 1),
    "glm4_moe, 3 layers": ("Glm4MoeConfig", DECODER | EXPERTS, 3),
    "deepseek_v3, 2 layers": ("DeepseekV3Config", DECODER | LATENT, 2),
    "mellum, sliding": ("MellumConfig", DECODER | MELLUM, 1),
}


def _vary(module: Any, *, scale: float, seed: int) -> Any:
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(seed)
        for weight in module.parameters():
            if weight.ndim > 1:
                weight.normal_(std=scale)
            else:
                weight.add_(torch.randn_like(weight), alpha=0.1)
    return module.eval().requires_grad_(False)


def build_target(name: str) -> Any:
    """A model whose configuration announces MTP layers; they are not among its weights."""
    config_name, options, num_layers = TARGETS[name]
    config = getattr(tf, config_name)(**options, num_mtp_layers=num_layers)
    model = _vary(tf.AutoModelForCausalLM.from_config(config), scale=0.12, seed=1)
    model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = 0
    return hf_specdec.enable(model)


def random_mtp(model: Any, *, seed: int = 4, scale: float = 0.12) -> MtpModel:
    """MTP layers with random weights; embeddings and output head are the model's."""
    mtp = MtpModel(model, model.config.get_text_config().num_mtp_layers)
    _vary(mtp.layers, scale=scale, seed=seed)
    return mtp.eval().requires_grad_(False)


def random_mtp_head(model: Any) -> MtpHead:
    """A head of `random_mtp`."""
    return MtpHead(random_mtp(model))


def fitted_mtp(model: Any, text: torch.Tensor, *, rounds: int | None = None, steps: int = 75) -> MtpModel:
    """MTP layers that have learned one text by heart, `(1, length)`: stage s drafts the token s + 2 places further.

    Args:
        rounds: how often layers take turns; more than there are layers repeats the last one.
    """
    mtp = random_mtp(model, scale=0.05)
    with torch.no_grad():
        hidden = model(text, output_hidden_states=True).hidden_states[-1]
    mtp.layers.requires_grad_(True)
    optimizer = torch.optim.Adam(mtp.layers.parameters(), lr=5e-3)
    for _ in range(steps):
        loss, states = torch.zeros(()), hidden
        for number in range(rounds or len(mtp.layers)):
            states = states[:, :-1]
            tokens = text[:, number + 1 :]
            layer = min(number, len(mtp.layers) - 1)
            positions = torch.arange(number + 1, text.shape[1])[None]
            states = mtp.forward_layer(layer, states, positions, None, input_ids=tokens)
            logits = model.lm_head(states[:, :-1])
            loss = loss + torch.nn.functional.cross_entropy(logits[0], tokens[0, 1:])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return mtp.eval().requires_grad_(False)


def save_checkpoint(model: Any, mtp: MtpModel, folder: Path) -> None:
    """Both in one folder as Mellum's checkpoints have them, the one MTP layer below `mtp.`."""
    model.save_pretrained(folder)
    weights = load_file(folder / "model.safetensors")
    outer = {"eh_proj": "fc", "enorm": "pre_fc_norm_embedding", "hnorm": "pre_fc_norm_hidden", "post_norm": "norm"}
    prefix = "model.layers.0."
    inner = {name.removeprefix(prefix) for name in weights if name.startswith(prefix)}
    for name, weight in mtp.layers[0].state_dict().items():
        part, _, rest = name.partition(".")
        if part in outer:
            weights[f"mtp.{outer[part]}.{rest}"] = weight.clone()
        elif rest in inner:
            weights[f"mtp.layers.0.{rest}"] = weight.clone()
        else:
            for expert, rows in enumerate(weight):
                if "gate_up" in rest:
                    gate, up = rows.chunk(2)
                    weights[f"mtp.layers.0.mlp.experts.{expert}.gate_proj.weight"] = gate.clone()
                    weights[f"mtp.layers.0.mlp.experts.{expert}.up_proj.weight"] = up.clone()
                else:
                    weights[f"mtp.layers.0.mlp.experts.{expert}.down_proj.weight"] = rows.clone()
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    assert config.get("num_nextn_predict_layers", config.get("num_mtp_layers")) == 1
