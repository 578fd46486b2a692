"""Configurations and modules of transformers' models: what has moved between releases, or has no public name.

Names                              Why
`_orig_mod`, `peft_config`         the model inside `torch.compile`'s wrapper and PEFT's
`active_peft_config`               whether PEFT's wrapper changes or reads prompts, unknown to the model inside
`_supports_default_dynamic_cache`  models whose argument for a cache takes another kind
`_is_stateful`                     models whose recurrent state would keep tokens that assisted decoding rejects
`embed_norm`                       a norm inside some models' embedding modules, which their drafters go without
`_compiled_call_impl`, `_torchdynamo_orig_callable`
                                   of torch: a compiled module does not call hooks set on its parts, and a compiled
                                   method stays bound to the module that it was compiled for
"""

import copy
import functools
import inspect
from typing import Any

import torch
from transformers import DynamicCache, PreTrainedModel

from hf_specdec.compat.caches import CACHE, cached_length
from hf_specdec.compat.modules import modules_of, own_weights


def generation_model(model: Any) -> Any:
    """The transformers model inside `torch.compile`'s wrapper and PEFT's, or `model` itself."""
    model = getattr(model, "_orig_mod", model)  # torch.compile(model)
    if hasattr(model, "peft_config") and hasattr(model, "get_base_model"):
        return model.get_base_model()
    return model


def adds_virtual_tokens(model: Any) -> bool:
    """Returns whether PEFT's wrapper puts virtual tokens before each prompt of its own `generate`."""
    return bool(getattr(_active_peft_config(model), "is_prompt_learning", False))


def has_virtual_tokens(model: PreTrainedModel) -> bool:
    """True if PEFT's wrapper puts virtual tokens before the prompt of the present call, by preparing the inputs."""
    prepare = vars(model).get("prepare_inputs_for_generation")
    return adds_virtual_tokens(getattr(prepare, "__self__", None))


def reads_prompts(model: Any) -> bool:
    """Returns whether PEFT's wrapper changes each prompt, or looks in it for where its aLoRA adapter begins."""
    return adds_virtual_tokens(model) or bool(getattr(_active_peft_config(model), "alora_invocation_tokens", None))


def _active_peft_config(model: Any) -> Any:
    return getattr(getattr(model, "_orig_mod", model), "active_peft_config", None)


def input_embeddings(model: Any) -> Any:
    """Token embeddings of a model or a part of it; `None` where its class does not say which module they are."""
    try:
        return model.get_input_embeddings()
    except (AttributeError, NotImplementedError):
        return None


def num_embeddings(model: PreTrainedModel, *, of_decoder: bool = False) -> int | None:
    """Number of token ids that can be embedded: rows of the embeddings, else the configuration's `vocab_size`.

    Args:
        of_decoder: whether the decoder's embeddings count, where a model has an encoder with others.
    """
    part = innermost_decoder(model) if of_decoder and model.config.is_encoder_decoder else model
    rows = getattr(input_embeddings(part), "num_embeddings", None)
    return rows if isinstance(rows, int) else getattr(text_config(model.config), "vocab_size", None)


def readable_padding(model: PreTrainedModel, token: int | None) -> int:
    """The id of padding, or 0 where the decoder cannot embed it: there may be none, -1, or one beyond the last row."""
    rows = num_embeddings(model, of_decoder=True)
    return token if token is not None and token >= 0 and (rows is None or token < rows) else 0


def num_weights(model: PreTrainedModel) -> int:
    """Weights that a forward multiplies with, each counted once, packed ones as they are held.

    Token embeddings are only looked up, unless the output head shares them.
    """
    weights = {weight for module in modules_of(model) for weight in own_weights(module)}
    looked_up = getattr(input_embeddings(model), "weight", None)
    if getattr(model.get_output_embeddings(), "weight", None) is not looked_up:
        weights.discard(looked_up)
    return sum(weight.numel() for weight in weights)


def bare_embeddings(embeddings: Any) -> Any:
    """The same token embeddings, over the same weights, without a norm that the module itself applies to them."""
    if not hasattr(embeddings, "embed_norm"):
        return embeddings
    bare = copy.copy(embeddings)
    bare._modules = {**embeddings._modules, "embed_norm": torch.nn.Identity()}
    return bare


def is_recurrent(model: PreTrainedModel) -> bool:
    """Returns whether the model has a recurrent state, so that transformers' assisted generation refuses it."""
    return bool(getattr(model, "_is_stateful", False))


def text_config(config: Any) -> Any:
    """The decoder's configuration of a composite model, or `config` itself."""
    return config.get_text_config(decoder=True)


def private_config(config: Any) -> Any:
    """A shallow copy, and a copy of its text part, to be changed without anyone else noticing."""
    copied, text = copy.copy(config), text_config(config)
    if text is config:
        return copied
    for name, value in vars(config).items():
        if value is text:
            object.__setattr__(copied, name, copy.copy(text))
    return copied


def takes_position_ids(model: PreTrainedModel) -> bool:
    """True if the model's forward, perhaps one on the instance, has an argument for the positions of its tokens."""
    return "position_ids" in inspect.signature(model.forward).parameters


def takes_positions(model: PreTrainedModel) -> bool:
    """True if the class's forward has an argument for the positions of the tokens it decodes, and goes by it."""
    name = "decoder_position_ids" if model.config.is_encoder_decoder else "position_ids"
    return name in _parameters_of(type(model).forward) and not ignores_positions(model.config)


@functools.cache
def _parameters_of(forward: Any) -> frozenset[str]:
    return frozenset(inspect.signature(forward).parameters)


def takes_cache(model: PreTrainedModel) -> bool:
    """True if a `DynamicCache` of its decoder's layers is all that the model keeps of a text, and counts its tokens."""
    takes_one = not model.config.is_encoder_decoder and CACHE in inspect.signature(type(model).forward).parameters
    takes_one = takes_one and model._supports_default_dynamic_cache()  # xLSTM's `cache` is one of its own
    return takes_one and cached_length(DynamicCache(config=model.config)) is not None


def takes_encoder_outputs(model: PreTrainedModel) -> bool:
    """Returns whether a decoder reads another model's encoder: `WhisperForCausalLM` does."""
    return not model.config.is_encoder_decoder and "encoder_outputs" in inspect.signature(model.forward).parameters


# Phi-4-multimodal takes them in every step, and puts them where tokens of theirs stand: a draft may hold one by chance.
OF_PROMPTS = ("image_pixel_values", "audio_input_features")


def max_positions(config: Any) -> int | None:
    """Positions that a model has, where it has an end; some configurations say -1 for none."""
    text = text_config(config)
    return next(iter(named_positions(text)), None)


def named_positions(config: Any) -> list[int]:
    """Numbers of positions that a configuration holds: those of speech decoders, of MPT and of others may be there."""
    names = ("max_target_positions", "max_seq_len", "max_position_embeddings")
    counts = (getattr(config, name, None) for name in names)
    return [positions for positions in counts if isinstance(positions, int) and positions > 0]


def ignores_positions(config: Any) -> bool:
    """True if a model makes ALiBi's bias from its columns although its forward takes positions, as Falcon's does."""
    return getattr(text_config(config), "alibi", False) is True


def counts_image_positions(model: PreTrainedModel) -> bool:
    """True if a part of the model computes the positions of a text with images, and may keep them for its next tokens.

    Where the model's preparation hands no positions to the forward, as GLM-Image's, only the model knows them.
    """
    return any(hasattr(module, "get_rope_index") for module in modules_of(model))


def is_compiled(model: PreTrainedModel) -> bool:
    """True if a forward of the model, or of a part of it, may run without the hooks that are set on its submodules."""
    return any(
        getattr(module, "_compiled_call_impl", None) is not None  # of torch, set by `module.compile()`
        or hasattr(vars(module).get("forward"), "_torchdynamo_orig_callable")  # by `torch.compile(module.forward)`
        for module in modules_of(model)
    )


def innermost_decoder(model: PreTrainedModel) -> Any:
    """The decoder of an encoder-decoder model; where it is a composite part, that part's."""
    decoder = model.get_decoder()
    return decoder.get_decoder() if hasattr(decoder, "get_decoder") else decoder


def num_decoder_layers(model: PreTrainedModel) -> int:
    """Layers of the decoder, each with a hidden state; some configurations count what is inside them."""
    layers = getattr(innermost_decoder(model), "layers", None)
    if isinstance(layers, torch.nn.ModuleList):
        return len(layers)
    return int(text_config(model.config).num_hidden_layers)


def rounds_tokens_together(model: PreTrainedModel) -> bool:
    """Returns whether bitsandbytes' int8 layers round a token by the outliers of the others in its forward."""
    config: Any = getattr(model.config, "quantization_config", None)
    return getattr(config, "load_in_8bit", False) is True and config.llm_int8_threshold > 0


def counts_padding_out(model: PreTrainedModel) -> bool:
    """True if the decoder has such a module of position embeddings: a token of padding in a text counts as none."""
    modules = modules_of(innermost_decoder(model) or model)
    return any(hasattr(module, "create_position_ids_from_input_ids") for module in modules)
