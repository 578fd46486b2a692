"""A target and a draft head: whether they go together, and the head's side of one call."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any, cast

import torch
from transformers import PreTrainedModel

from hf_specdec.compat import models
from hf_specdec.compat.devices import input_device, is_shared, load_factor
from hf_specdec.compat.models import bare_embeddings, input_embeddings, num_decoder_layers, text_config
from hf_specdec.compat.modules import as_read_by
from hf_specdec.distributed.placement import read_devices
from hf_specdec.engine.call import UNBOUNDED, Call
from hf_specdec.engine.draft_pairing import MAX_PADDING
from hf_specdec.engine.model_state import state_of
from hf_specdec.engine.static_shapes import head_shapes
from hf_specdec.errors import ConfigError, UnsupportedModelError
from hf_specdec.forward.compiled_forward import CompiledShapes, StepKind
from hf_specdec.forward.networks.block_runner import BLOCK_STEP, BlockRunner
from hf_specdec.forward.networks.head_base import BaseHeadRunner, HeadCall
from hf_specdec.forward.networks.head_runner import HeadRunner
from hf_specdec.forward.networks.head_stage import PAIR_STEP
from hf_specdec.methods.common.config import SpecConfig
from hf_specdec.methods.common.draft_head import BlockHead, DraftHead, PairHead
from hf_specdec.methods.common.draft_scorer import cost_ratio
from hf_specdec.methods.common.entry import Method


def check_head(target: PreTrainedModel, head: DraftHead) -> tuple[int, ...]:
    """The hidden states of `target` that `head` reads.

    Raises:
        ConfigError: the head was made for a target of another width, vocabulary or number of layers.
        UnsupportedModelError: the target is an encoder-decoder, or its token embeddings are not known or of another
            width than its layers.
    """
    check_target(target)
    config, num_layers = text_config(target.config), num_decoder_layers(target)
    layers = head.layer_ids(num_layers)
    vocab_size = config.vocab_size if head.vocab_size is None else head.vocab_size
    tokens = [] if head.target_ids is None else [int(head.target_ids.max())]
    tokens += [head.mask_token_id] if isinstance(head, BlockHead) else []
    fits_tokens = abs(config.vocab_size - vocab_size) <= MAX_PADDING and max(tokens, default=0) < config.vocab_size
    if config.hidden_size != head.target_hidden_size or not fits_tokens or max(layers) > num_layers:
        sizes = f"hidden_size {config.hidden_size}, vocab_size {config.vocab_size} and {num_layers} layers"
        value = f"a head for {head.target_hidden_size} and {vocab_size} that reads the layers {layers}"
        remedy = f"Choose a head that was trained for this {type(target).__name__}."
        raise ConfigError("assistant_model", f"must fit the target's {sizes}", value, remedy)
    if head.embed_tokens is None:
        check_target(target, embedding_width=head.hidden_size)
    return layers


def check_target(target: PreTrainedModel, *, embedding_width: int | None = None) -> Any:
    """The target's token embeddings.

    Args:
        embedding_width: columns that a head without embeddings of its own reads.

    Raises:
        UnsupportedModelError: as for `check_head`.
    """
    name = type(target).__name__
    if target.config.is_encoder_decoder:
        raise UnsupportedModelError(f"Draft heads read decoder-only models, but {name} is an encoder-decoder.")
    embeddings = input_embeddings(target)
    if embeddings is None:
        raise UnsupportedModelError(f"Draft heads read the target's token embeddings, but {name} does not name them.")
    width = getattr(embeddings, "embedding_dim", embedding_width)
    if embedding_width is not None and embedding_width != width:
        message = f"Draft heads read token embeddings as wide as its layers, but those of {name} have {width} columns"
        raise UnsupportedModelError(f"{message} and its layers {text_config(target.config).hidden_size}.")
    return embeddings


def head_runner_of(call: Call, head: DraftHead, *, budget: int, compiles: bool) -> BaseHeadRunner[Any]:
    """The head with a cache of its own, for the call's prompts.

    Args:
        budget (`int`): most tokens drafted a step.
        compiles (`bool`): whether its forwards are compiled, as the target's are.
    """
    length = call.input_ids.shape[1]
    room = UNBOUNDED if call.max_new_tokens is None else call.max_new_tokens
    prompts = [call.prompt_of(row) for row in range(len(call.input_ids))]
    embed = input_embeddings(call.model)
    if head.skips_embedding_norm:
        embed = bare_embeddings(embed)
    about = HeadCall(
        prompts=prompts,
        embed=embed,
        hidden_layers=head.layer_ids(num_decoder_layers(call.model)),
        vocab_size=text_config(call.model.config).vocab_size,
        relative_cost=_relative_cost(call, head),
        device=call.input_ids.device,
        # embeddings and output head may be shared out, so that their forwards are collectives
        is_shared=is_shared(call.model),
        room=room,
    )

    def shapes_of(kind: StepKind, widest: int) -> CompiledShapes | None:
        return head_shapes(call, head, kind, num_columns=length + room, widest=widest) if compiles else None

    if isinstance(head, BlockHead):
        about = replace(about, shapes=shapes_of(BLOCK_STEP, widest=head.block_size))
        if head.lm_head is not None:
            return BlockRunner(head, about, head.lm_head)
        about = replace(about, output_head=call.model.get_output_embeddings())
        return BlockRunner(head, about, output_head(call.model))
    assert isinstance(head, PairHead)
    return HeadRunner(head, replace(about, shapes=shapes_of(PAIR_STEP, widest=1 + budget)))


def output_head(target: PreTrainedModel) -> Callable[[torch.Tensor], torch.Tensor]:
    """States to the target's logits, on the device and in the precision of its head, capped as the target's are.

    Raises:
        UnsupportedModelError: the target has no output head over its hidden states.
    """
    head: Any = target.get_output_embeddings()
    config = text_config(target.config)
    width = None if head is None else getattr(head, "in_features", config.hidden_size)
    if width != config.hidden_size:
        message = (
            f"This draft head needs an output head over the target's hidden_size {config.hidden_size}, but that of"
        )
        raise UnsupportedModelError(f"{message} {type(target).__name__} reads {width} numbers a token.")
    cap = getattr(config, "final_logit_softcapping", None)

    def project(states: torch.Tensor) -> torch.Tensor:
        logits = cast("torch.Tensor", head(as_read_by(head, states)))
        return logits if cap is None else torch.tanh(logits / cap) * cap

    return project


def checkpoint_head_of(target: PreTrainedModel, method: Method | None, config: SpecConfig) -> DraftHead | None:
    """The head that a method makes of the target's own checkpoint, loaded once; `None` where it makes none.

    Args:
        config: may hold a list of devices; without one the head goes where the target reads its inputs.

    Raises:
        CheckpointError, UnsupportedModelError: there is none for this target.
    """
    if method is None or method.checkpoint_head is None:
        return None
    heads = state_of(target).heads
    if method.name not in heads:
        heads[method.name] = method.checkpoint_head(target)
    return place_head(heads[method.name], target, config)


def place_head(head: DraftHead, target: PreTrainedModel, config: SpecConfig) -> DraftHead:
    """Put a head where the configuration's list of devices says, else where the target reads its inputs.

    Raises:
        ConfigError: a device that is not here.
    """
    listed = config.device_lists.get("draft")
    if listed is None:
        return head.to(input_device(target))
    return head.to(read_devices(listed, config.device_fields["draft"])[0])


def without_weights_of(target: PreTrainedModel, head: DraftHead) -> None:
    """Drop embeddings and an output head of `head` that equal the target's, so that it reads those."""
    if _are_equal(head.embed_tokens, input_embeddings(target), torch.nn.Embedding):
        head.embed_tokens = None
    output = target.get_output_embeddings()
    is_capped = getattr(text_config(target.config), "final_logit_softcapping", None) is not None
    if not isinstance(head, BlockHead) or head.target_ids is not None or is_capped:
        return
    if _are_equal(head.lm_head, output, torch.nn.Linear) and output.bias is None:
        head.lm_head = None


def _are_equal(of_head: Any, of_target: Any, module_class: type) -> bool:
    """Returns whether both are modules of exactly this class with equal weights in one dtype."""
    if {type(of_head), type(of_target)} != {module_class}:
        return False
    weight, target_weight = of_head.weight, of_target.weight
    if (
        type(target_weight) is not torch.nn.Parameter
        or target_weight.is_meta
        or (weight.shape, weight.dtype) != (target_weight.shape, target_weight.dtype)
    ):
        return False
    return torch.equal(weight, target_weight.to(weight.device))


def _relative_cost(call: Call, head: DraftHead) -> float:
    """Cost of a forward of the head over one of the target, roughly."""
    num_layers = text_config(call.model.config).num_hidden_layers
    num_weights = head.num_weights
    if isinstance(head, BlockHead) and head.lm_head is None:  # it reads the target's output head for each block
        num_weights += sum(weight.numel() for weight in call.model.get_output_embeddings().parameters())
    weights = (num_weights, call.facts.of(models.num_weights, call.model))
    return cost_ratio(weights, (head.num_layers, num_layers)) / load_factor(call.model)
