"""Make a Llama-shaped checkpoint larger without changing what it computes.

A small model's forward is bound by arithmetic, so its speedups say nothing of a large one's. Widened, it writes the
same text at the cost of the size you choose. With hidden size d grown to D:

- embeddings and the output layer are padded with zeros, so the added dimensions of the residual stream stay zero;
- an RMSNorm divides by the root of the mean square, which shrinks by d/D: its weights are scaled by sqrt(d/D), its
  epsilon by d/D;
- added heads and MLP units compute on random weights, and their columns in `o_proj` and `down_proj` are zero;
- added layers have `o_proj` and `down_proj` zero.

A draft head is widened along with its target: the rows that its `fc` adds are zero too.

Knows nothing about benchmarks.

    large = widen(model, hidden_size=768, num_layers=12)
    check_widening(model, large)    # largest difference of the logits, about 1e-5
    widen_head(head, model, large)  # drafts for `large` what `head` drafts for `model`
"""

import contextlib
import copy
import dataclasses
import math
from collections.abc import Iterator
from typing import Any

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from hf_specdec.errors import ConfigError, UnsupportedModelError
from hf_specdec.methods.common.draft_head import DraftHead
from hf_specdec.methods.dflash.network import DFlashHead
from hf_specdec.methods.eagle3.network import Eagle3Head

TOLERANCE = 1e-3
ROWS_OF_RESIDUAL = ("o_proj", "down_proj", "fc")
PARTS = {
    "self_attn": ("q_proj", "k_proj", "v_proj", "o_proj"),
    "mlp": ("gate_proj", "up_proj", "down_proj"),
}


def read_size(text: str) -> tuple[int, int]:
    """Hidden size and number of layers out of `"HIDDENxLAYERS"`."""
    hidden, _, layers = text.partition("x")
    if not (hidden.isdecimal() and layers.isdecimal() and int(hidden) and int(layers)):
        raise ConfigError("widen", "must be HIDDENxLAYERS", text, "For example 768x12.")
    return int(hidden), int(layers)


def widen(model: PreTrainedModel, *, hidden_size: int, num_layers: int) -> PreTrainedModel:
    """A larger model with the same logits, in the dtype and on the device of `model`, which is left as it is.

    Args:
        model (`PreTrainedModel`): a Llama-shaped model.
        hidden_size (`int`): at least the model's; heads and MLP units grow in proportion and must stay whole.
        num_layers (`int`): at least the model's.

    Raises:
        UnsupportedModelError: the model is not Llama-shaped.
        ConfigError: a size that is too small or divides badly.
    """
    _check_shape(model)
    config = _larger_config(model.config, hidden_size, num_layers)
    with _seeded(model.device):
        large = AutoModelForCausalLM.from_config(config, dtype=model.dtype).eval()
    scale = math.sqrt(model.config.hidden_size / hidden_size)
    sources = dict(model.named_parameters())
    with torch.no_grad():
        for name, parameter in large.named_parameters():
            _fill(name, parameter, sources.get(name), model.config.hidden_size, scale)
    _keep_head_norms(large, model.config.rms_norm_eps)
    large.generation_config = copy.deepcopy(model.generation_config)
    return large


def widen_head(head: DraftHead, original: PreTrainedModel, widened: PreTrainedModel) -> Eagle3Head | DFlashHead:
    """A head as wide as `widened` that drafts what `head` drafts for `original`.

    Raises:
        UnsupportedModelError: it is no head whose weights are known, or its states are not as wide as its target's.
    """
    if not isinstance(head, Eagle3Head | DFlashHead):
        raise UnsupportedModelError(
            f"`widen_head` needs an EAGLE-3 or DFlash head, but {head.name_or_path!r} is a {type(head).__name__} of "
            "another kind. Measure it at its own size."
        )
    width, wide = int(original.config.hidden_size), int(widened.config.hidden_size)
    if (head.hidden_size, head.target_hidden_size) != (width, width):
        raise UnsupportedModelError(
            f"`widen_head` needs a head of hidden size {width}, its target's, but it is {head.hidden_size}, for a "
            f"target of {head.target_hidden_size}. Measure it at its own size."
        )
    last, read_ids = original.config.num_hidden_layers, head.layer_ids(original.config.num_hidden_layers)
    shape: dict[str, Any] = {
        "layer": _larger_config(head.config.layer, wide, head.config.layer.num_hidden_layers),
        "target_hidden_size": wide,
        "layer_ids": tuple(widened.config.num_hidden_layers if layer == last else layer for layer in read_ids),
    }
    with _seeded(head.device):
        large = head.like(dataclasses.replace(head.config, **shape))
    large = large.to(dtype=head.dtype, device=head.device).eval()
    sources, scale = dict(head.named_parameters()), math.sqrt(width / wide)
    with torch.no_grad():
        for name, parameter in large.named_parameters():
            blocks = _num_blocks(name, len(read_ids), reads_pairs=isinstance(head, Eagle3Head))
            new, old = (p.view(*p.shape[:-1], blocks, -1) for p in (parameter, sources[name]))
            _fill(name, new, old, width, scale)
    _keep_head_norms(large, head.config.layer.rms_norm_eps)
    large.load_state_dict(dict(head.named_buffers()), strict=False)  # which tokens it drafts
    return large


def check_widening(original: PreTrainedModel, widened: PreTrainedModel, *, num_tokens: int = 64) -> float:
    """Largest difference between the logits of the two on random tokens.

    Args:
        original (`PreTrainedModel`): what `widen` was given.
        widened (`PreTrainedModel`): what it returned.
        num_tokens (`int`, *optional*, defaults to `64`): random tokens.

    Raises:
        UnsupportedModelError: it is too large for rounding; the model computes something widening does not know.
    """
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(original.config.vocab_size, (1, num_tokens), generator=generator).to(original.device)
    with torch.no_grad():
        difference = (original(ids).logits.float() - widened(ids).logits.float()).abs().max()
    if not difference <= TOLERANCE:
        raise UnsupportedModelError(
            f"Widening {type(original).__name__} changes its logits by {difference:.2e}. "
            "Only models built like Llama can be widened; measure this one at its own size."
        )
    return float(difference)


@contextlib.contextmanager
def _seeded(device: torch.device) -> Iterator[None]:
    """Weights are drawn on the device, which takes seconds where a CPU takes minutes, and always alike."""
    devices = [] if device.type == "cpu" else [device]
    with torch.random.fork_rng(devices, device_type="cuda" if device.type == "cpu" else device.type), device:
        torch.manual_seed(0)
        yield


def _check_shape(model: Any) -> None:
    layers = getattr(getattr(model, "model", None), "layers", None)
    names = [name for name, _ in model.named_modules()]
    wanted = [f"model.layers.0.{block}.{part}" for block, parts in PARTS.items() for part in parts]
    missing = [name for name in (*wanted, "model.norm", "lm_head", "model.embed_tokens") if name not in names]
    if layers is None or missing or not hasattr(model.config, "rms_norm_eps"):
        raise UnsupportedModelError(
            f"`widen` needs a Llama-shaped model, but {type(model).__name__} lacks {', '.join(missing) or 'RMSNorm'}. "
            "Measure it at its own size."
        )


def _larger_config(config: Any, hidden_size: int, num_layers: int) -> Any:
    if hidden_size < config.hidden_size or num_layers < config.num_hidden_layers:
        least = f"{config.hidden_size}x{config.num_hidden_layers}"
        raise ConfigError("widen", f"must be at least {least}", f"{hidden_size}x{num_layers}", "Choose a larger size.")
    large = copy.deepcopy(config)
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    for name in ("num_attention_heads", "num_key_value_heads"):
        grown, rest = divmod(getattr(config, name) * hidden_size, config.hidden_size)
        if rest:
            step = config.hidden_size // math.gcd(config.num_key_value_heads, config.hidden_size)
            raise ConfigError(
                "widen", f"must have a hidden size that is a multiple of {step}", hidden_size, "Round it."
            )
        setattr(large, name, grown)
    large.head_dim = head_dim
    large.intermediate_size = round(config.intermediate_size * hidden_size / config.hidden_size)
    large.rms_norm_eps = config.rms_norm_eps * config.hidden_size / hidden_size
    large.hidden_size, large.num_hidden_layers = hidden_size, num_layers
    if getattr(large, "layer_types", None):
        kinds = config.layer_types
        large.layer_types = [kinds[index % len(kinds)] for index in range(num_layers)]
    return large


def _keep_head_norms(large: torch.nn.Module, epsilon: float) -> None:
    """Norms within an attention head, whose size stays, keep their epsilon."""
    for name, module in large.named_modules():
        if name.endswith(("q_norm", "k_norm")):
            module.variance_epsilon = epsilon


def _num_blocks(name: str, num_features: int, *, reads_pairs: bool) -> int:
    """Number of states that lie side by side in the last dimension of a head's parameter.

    Args:
        reads_pairs: whether its first layer reads a token's embedding and a state.
    """
    if name.startswith(("fc.", "input_norm.")):
        return num_features
    is_pair = name.startswith("layers.0.") and name.endswith(("q_proj.weight", "k_proj.weight", "v_proj.weight"))
    return 2 if reads_pairs and is_pair else 1


def _fill(name: str, new: torch.Tensor, old: torch.Tensor | None, hidden_size: int, scale: float) -> None:
    """Write one parameter of the larger model; `old` is the one of the same name, if there is one."""
    module = name.rpartition(".")[0].rpartition(".")[2] or name
    if module in (*ROWS_OF_RESIDUAL, "embed_tokens", "lm_head", "mask_embedding"):
        new.zero_()
    if old is None:
        return
    if "norm" in name and old.shape[-1] == hidden_size and module not in ("q_norm", "k_norm"):
        new.fill_(1.0)
        new[..., :hidden_size] = old * scale
        return
    new[tuple(slice(size) for size in old.shape)] = old
