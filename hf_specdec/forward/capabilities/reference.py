"""A text as plain generation computes it, the reference of the probes: a prompt's forward, then one for each token."""

from dataclasses import dataclass
from typing import Any

import torch
from transformers import GenerationConfig, PreTrainedModel

from hf_specdec.compat.caches import cache_name
from hf_specdec.compat.devices import input_device
from hf_specdec.compat.generation import Encoded, attends_only, fresh_cache, own_positions, prefill, updated_kwargs
from hf_specdec.compat.models import max_positions, takes_position_ids, text_config
from hf_specdec.kernels.cpu_kernels import CpuKernels
from hf_specdec.kernels.layers import counted

PROMPT_LENGTH, LONGEST_PROMPT = 7, 1024
PERIOD = 6
NUM_COMING = 8
OWN_WINDOWS = ("window", "local", "chunk", "block", "index_topk")
MASKED_WINDOWS = ("sliding_window", "attention_chunk_size")  # read by transformers' mask functions


@dataclass(frozen=True, slots=True)
class Reference:
    """A text and what plain generation computes of it.

    Attributes:
        prompt: `(rows, length)`.
        coming: `(rows, n)`: the tokens that were computed one by one after it.
        logits: `(rows, n, vocab_size)` after each of `coming`; `(rows, 1, vocab_size)` after the prompt without any.
        cache: what the model has cached after the last of them.
        kept: copies of `module_tensors` then.
        outputs: of the last forward.
    """

    prompt: torch.Tensor
    coming: torch.Tensor
    logits: torch.Tensor
    cache: Any
    kept: list[torch.Tensor]
    outputs: Any


def reference(model: PreTrainedModel, kwargs: dict[str, Any], prompt: torch.Tensor, coming: torch.Tensor) -> Reference:
    """Compute a text plainly, by the kernels that speculative forwards have, which round alike.

    Args:
        kwargs: what `generate` hands to a decoding method.
        prompt: `(rows, length)`.
        coming: `(rows, n)`.
    """
    ids, kernels = torch.cat([prompt, coming], dim=1), CpuKernels(model)
    with kernels.of_prompts:
        outputs = prefill(model, prompt, GenerationConfig(), kwargs)
    kwargs = updated_kwargs(model, outputs, kwargs)
    logits = []
    for length in range(prompt.shape[1] + 1, ids.shape[1] + 1):
        inputs = model.prepare_inputs_for_generation(ids[:, :length], next_sequence_length=1, **kwargs)
        with counted(), kernels:  # one token at a time says nothing about several
            outputs = model(**inputs, return_dict=True)
        logits.append(outputs.logits[:, -1].float())
        kwargs = updated_kwargs(model, outputs, kwargs)
    all_logits = torch.stack(logits, dim=1) if logits else outputs.logits[:, -1:].float()
    kept = [tensor.clone() for _, _, tensor in module_tensors(model)]
    return Reference(prompt, coming, all_logits, kwargs.get(cache_name(kwargs)), kept, outputs)


def module_tensors(model: PreTrainedModel) -> list[tuple[torch.nn.Module, str, torch.Tensor]]:
    """Tensors that are plain attributes: neither weights nor buffers, but what forwards leave to the next ones."""
    return [
        (module, name, value)
        for module in model.modules()
        for name, value in vars(module).items()
        if isinstance(value, torch.Tensor)
    ]


def arguments(model: PreTrainedModel, ids: torch.Tensor, encoder_kwargs: dict[str, Any]) -> dict[str, Any]:
    """Arguments that `generate` hands to a decoding method for this prompt."""
    kwargs = {"use_cache": True, **encoder_kwargs, **fresh_cache(model, len(ids))}
    if not model.config.is_encoder_decoder and takes_position_ids(model):
        kwargs["position_ids"] = own_positions(model, ids, kwargs)
    return kwargs


def encoded(model: PreTrainedModel) -> dict[str, Any]:
    """Encoder outputs of a few tokens; those of sound or images, which are not there, of the right shape."""
    encoder = model.get_encoder()
    if model.main_input_name == "input_ids":
        prompt, _ = tokens_of(model, 0)
        ids = torch.tensor([prompt], device=input_device(model))
        return {"encoder_outputs": encoder(input_ids=ids, return_dict=True)}
    config = getattr(encoder, "config", model.config)
    size = getattr(config, "hidden_size", None) or config.d_model
    states = torch.arange(PROMPT_LENGTH * size, device=input_device(model)).sin().view(1, PROMPT_LENGTH, size)
    return {"encoder_outputs": Encoded(last_hidden_state=states.to(model.dtype))}


def tokens_of(model: PreTrainedModel, attempt: int) -> tuple[list[int], list[int]]:
    """A prompt that repeats itself and eight more tokens, spread over the vocabulary, no two neighbours alike."""
    vocab_size: int = text_config(model.config).vocab_size
    step = max(vocab_size // 19, 1)
    tokens = [(7 + attempt + step * i) % vocab_size for i in range(PERIOD + NUM_COMING)]
    return [tokens[i % PERIOD] for i in range(_prompt_length(model))], tokens[PERIOD:]


def _prompt_length(model: PreTrainedModel) -> int:
    """Long enough to reach beyond a window that a model applies by itself."""
    positions = max_positions(model.config) or LONGEST_PROMPT
    return max(PROMPT_LENGTH, min(max(_own_windows(model), default=0) + 4, positions - NUM_COMING))


def _own_windows(model: PreTrainedModel) -> list[int]:
    """Sizes in the configuration that may be windows unseen by transformers' mask functions."""
    masked = MASKED_WINDOWS if attends_only(model) else ()
    return [
        value
        for name, value in vars(text_config(model.config)).items()
        if isinstance(value, int)
        and any(word in name for word in OWN_WINDOWS)
        and name not in masked
        and value <= LONGEST_PROMPT
    ]
