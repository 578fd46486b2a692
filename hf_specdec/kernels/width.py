"""Reasons why a token's logits may depend on the other tokens of its forward, by their rounding."""

import torch
from transformers import PreTrainedModel

from hf_specdec.common.transfer import is_host
from hf_specdec.compat.attention import MASKED, attention_implementation
from hf_specdec.compat.models import innermost_decoder, is_compiled
from hf_specdec.compat.modules import modules_of, parameters_of
from hf_specdec.compat.state_layers import has_states_alone
from hf_specdec.kernels import cpu
from hf_specdec.kernels.cpu_kernels import FewTokenLayers
from hf_specdec.kernels.packed import Packed


def reason_for_width(model: PreTrainedModel) -> str | None:
    """Reason why forwards of several tokens may round otherwise than forwards of one.

    `None` where the core computes every sum over a token's numbers and over the keys that it sees, each in one order.
    What it has no kernel for, such as attention that a model's own code adds up, only a trial forward shows.
    """
    if model.dtype == torch.float32:
        return "in fp32 the faster kernel computes each number of tokens, and sums have other orders"
    if not is_host(model.device):
        return f"on {model.device.type} a kernel is chosen by the number of tokens"
    if (reason := cpu.why_unused()) is not None:
        return f"torch chooses a kernel by the number of tokens: {reason}"
    if is_compiled(model):
        return "a compiled forward has kernels for each number of tokens"
    if (name := attention_implementation(model.config)) not in MASKED and not has_states_alone(model):
        return f'{name!r} attention rounds by the number of tokens; attn_implementation="sdpa" does not'
    replaced = {forward.module for forward in FewTokenLayers(model).forwards}
    prompts_alone = _encoder_modules(model)
    for module in modules_of(model):
        if module in prompts_alone:
            continue
        # Of a convolution a trial forward shows the use.
        is_alike = module in replaced or isinstance(module, torch.nn.Embedding | torch.nn.Conv1d | Packed)
        if not is_alike and _multiplies(module):
            return f"torch computes {type(module).__name__}, and rounds by the number of tokens"
    return None


def _encoder_modules(model: PreTrainedModel) -> set[torch.nn.Module]:
    """Modules that the forward of a prompt alone computes: encoders of text, images and sound."""
    if not hasattr(model, "get_decoder"):
        return set()
    decoder, output = innermost_decoder(model), model.get_output_embeddings()
    kept = {module for part in (decoder, output) if part is not None for module in modules_of(part)}
    return set(modules_of(model)) - kept - {model}


def _multiplies(module: torch.nn.Module) -> bool:
    """Returns whether a module has a matrix of its own; what norms have scales number by number."""
    return any(parameter is not None and parameter.dim() > 1 for parameter in parameters_of(module).values())
