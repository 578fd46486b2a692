"""A target and its draft model: whether they and the method go together, and the draft's side of one call."""

import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch
from transformers import GenerationMixin, LogitsProcessorList, PreTrainedModel

from hf_specdec.common.transfer import HOST, left_padded
from hf_specdec.compat.caches import cache_name
from hf_specdec.compat.devices import device_mesh, input_device, is_dispatched, load_factor
from hf_specdec.compat.fingerprint import Fingerprint
from hf_specdec.compat.generation import fresh_cache, in_order
from hf_specdec.compat.models import (
    adds_virtual_tokens,
    generation_model,
    num_weights,
    takes_encoder_outputs,
    takes_position_ids,
    text_config,
)
from hf_specdec.engine.call import Call
from hf_specdec.engine.model_state import state_of
from hf_specdec.engine.sampling.node_processors import reads_ids, takes_all_nodes
from hf_specdec.engine.sampling.per_row import is_pure, processors_of_row
from hf_specdec.engine.static_shapes import draft_shapes
from hf_specdec.errors import ConfigError, UnsupportedModelError
from hf_specdec.forward.capabilities.probe import UNTRIED, Capability
from hf_specdec.forward.model_facts import ModelFacts
from hf_specdec.forward.model_runner import Tier
from hf_specdec.forward.networks.draft_runner import DraftRunner
from hf_specdec.methods.common.config import SpecConfig
from hf_specdec.methods.common.draft_head import DraftHead
from hf_specdec.methods.common.draft_scorer import cost_ratio
from hf_specdec.methods.common.entry import Method
from hf_specdec.methods.common.sampling import LogitsProcessorFn
from hf_specdec.methods.common.translation import Translation, check_tokenizers, share_token_ids

MAX_PADDING = 1024  # ids by which vocabularies of one tokenizer differ, rounded up to a multiple for the hardware


def read_draft(
    arguments: dict[str, Any], method: Method, config: SpecConfig, assistant: Any
) -> tuple[Any, tuple[Any, Any] | None]:
    """The draft model or head that the method drafts with, and the tokenizers of both models where they differ.

    Args:
        arguments: of `generate`; the tokenizer of the draft is removed.
        assistant: the draft among them.

    Raises:
        ConfigError: the draft is of a kind that the method does not draft with, or a tokenizer is missing, or the
            method does not translate.
    """
    if config.engine != "loop":
        remedy = "Leave it out, or pass spec_method=None to have transformers draft with the model."
        raise ConfigError("engine", 'must be "loop" with an assistant_model', config.engine, remedy)
    network = generation_model(assistant)
    is_head = isinstance(network, DraftHead)
    if is_head:
        _check_kind_of_head(method, network, assistant)
    else:
        _check_draft_model(method, assistant, network)
    if (tokenizer := arguments.pop("assistant_tokenizer", None)) is None:
        return network, None
    if not is_head:
        check_tokenizers(arguments.get("tokenizer"), tokenizer)
        if share_token_ids(arguments["tokenizer"], tokenizer):
            return network, None
    if is_head or not method.translates or config.draws_drafts:
        rule = 'must be unset but with a model, spec_method="draft_model" and no use_logits, which translates drafts'
        raise ConfigError("assistant_tokenizer", rule, type(tokenizer).__name__, "Leave it out.")
    return network, (arguments["tokenizer"], tokenizer)


def _check_kind_of_head(method: Method, head: DraftHead, assistant: Any) -> None:
    """Raise where the method does not draft with heads of this kind."""
    if method.name not in head.methods:
        rule = f"must be of another kind with spec_method={method.name!r}"
        remedy = f'Use spec_method="{head.methods[0]}" for a head of this kind.'
        raise ConfigError("assistant_model", rule, type(assistant).__name__, remedy)


def _check_draft_model(method: Method, assistant: Any, network: Any) -> None:
    """Raise where a draft is no model that generates, or the method drafts with heads only."""

    def refuse(rule: str, remedy: str, value: object = type(assistant).__name__) -> None:
        raise ConfigError("assistant_model", rule, value, remedy)

    if not method.takes_draft_model:
        remedy = 'Load it with hf_specdec.AutoDraftHead, or use spec_method="draft_model" for a model.'
        refuse(f"must be a draft head with spec_method={method.name!r}", remedy)
    is_model = isinstance(network, PreTrainedModel) and isinstance(network, GenerationMixin)
    if not is_model or not network.can_generate():
        refuse("must be a model that generates", "Load it with hf_specdec.AutoModelForCausalLM.")
    if network.device.type == "meta" and not is_dispatched(network):
        remedy = "Load its weights with from_pretrained."
        refuse("must have weights, not be on the meta device", remedy, network.device)
    if network.config.is_encoder_decoder:
        remedy = 'Use spec_method="auto" without one, or a decoder alone (WhisperForCausalLM).'
        refuse("must be a decoder, with no encoder of its own", remedy)
    if adds_virtual_tokens(assistant):
        remedy = "Pass its get_base_model(), which drafts without them, or a draft with a LoRA adapter."
        refuse("must have no virtual tokens of PEFT's", remedy)


def check_pair(target: PreTrainedModel, draft: PreTrainedModel, *, translates: bool = False) -> None:
    """Refuse a draft model whose token ids cannot be the target's.

    Args:
        translates: whether the draft has a tokenizer of its own.

    Raises:
        ConfigError: the models are of different kinds, their vocabularies differ by more than padding, or the draft
            alone is shared between processes.
    """
    if target.config.is_encoder_decoder:
        _check_encoder(target, draft)
    name, is_shared_out = type(draft).__name__, device_mesh(draft) is not None
    if is_shared_out and (translates or device_mesh(target) is None):
        rule = "must be in one process, where the target is or with an assistant_tokenizer"
        raise ConfigError("assistant_model", rule, f"{name} with a tp_plan", "Load the draft without it.")
    if translates:
        if target.config.is_encoder_decoder:
            rule = "must share the tokenizer of an encoder-decoder"
            raise ConfigError("assistant_model", rule, name, "Choose a draft with the target's tokenizer.")
        return
    sizes = vocab_sizes(target, draft)
    if abs(sizes[0] - sizes[1]) > MAX_PADDING:
        raise ConfigError(
            "assistant_model",
            f"must share the target's tokenizer (the target has {sizes[0]} token ids, the draft {sizes[1]})",
            name,
            "Choose a draft of the same family, or pass tokenizer= and assistant_tokenizer= to have its drafts "
            "translated.",
        )


def _check_encoder(target: PreTrainedModel, draft: PreTrainedModel) -> None:
    """Refuse a draft that cannot read the target's encoder."""
    name = type(draft).__name__
    if not takes_encoder_outputs(draft):
        raise ConfigError(
            "assistant_model", "must read the target's encoder", name, 'Use spec_method="auto" without one.'
        )
    width, target_width = (getattr(model.config, "hidden_size", None) for model in (draft, target))
    if width != target_width:
        rule = f"must have the target's hidden_size of {target_width} to read its encoder"
        raise ConfigError("assistant_model", rule, f"{name} with {width}", f"Load it with {type(target).__name__}.")


def translations_of(call: Call, tokenizer: Any, assistant_tokenizer: Any) -> list[Translation]:
    """Each row's prompt in both vocabularies."""
    translations = [Translation(tokenizer, assistant_tokenizer) for _ in range(len(call.input_ids))]
    for row, translation in enumerate(translations):
        translation.begin(call.prompt_of(row))
    return translations


def vocab_sizes(*models: PreTrainedModel) -> list[int]:
    """Number of token ids that each model knows, padding included."""
    return [text_config(model.config).vocab_size for model in models]


def draft_capability(
    target: PreTrainedModel, draft: PreTrainedModel, *, translates: bool = False, now: Fingerprint | None = None
) -> Capability:
    """Checks that target and draft go together; returns what the draft's probe has found.

    Args:
        translates: whether the draft has a tokenizer of its own.
        now: the draft's fingerprint, where it is known.

    Raises:
        ConfigError: the models do not go together.
        UnsupportedModelError: the draft cannot roll back, so that it could not follow the text.
    """
    check_pair(target, draft, translates=translates)
    capability = state_of(draft).findings.of(draft, now=now).capability
    if capability.reason.startswith(UNTRIED):
        raise UnsupportedModelError(
            f"`assistant_model` must compute a few tokens when it is tried, but {type(draft).__name__} does not: "
            f"{capability.reason.removeprefix(UNTRIED + ': ')}. "
            "Check its weights, its dtype and the memory that is free."
        )
    if capability.tier == "plain":
        raise UnsupportedModelError(
            f"`assistant_model` must be able to forget rejected tokens, but {type(draft).__name__} is not: "
            f"{capability.reason}. Choose a draft with attention layers."
        )
    return capability


def draft_runner_of(
    call: Call,
    draft: PreTrainedModel,
    *,
    tier: Tier,
    budget: int,
    facts: ModelFacts,
    translations: Sequence[Translation] | None = None,
) -> DraftRunner:
    """The draft model with a cache of its own, ready to read the call's prompts.

    Args:
        budget: most tokens drafted a step.
        facts: what is known of the draft's structure.
        translations: each row's prompt in the draft's vocabulary, where that is another one.
    """
    ids, mask = call.input_ids, call.model_kwargs.get("attention_mask")
    if translations is not None:
        # The last fixed token is the first root, after the prompt; a text of one token has it twice.
        ids, mask = left_padded([translation.fixed[:-1] or translation.fixed for translation in translations], HOST)
        mask = None if bool(mask.all()) else mask
    ids = ids.to(input_device(draft))
    if call.model.config.is_encoder_decoder:
        kwargs = _with_targets_encoding(call, draft)
    else:
        kwargs = _decoder_kwargs(draft, ids, mask)
    shapes = draft_shapes(call, draft, tier=tier, num_columns=ids.shape[1] + call.room, budget=budget)
    if shapes is not None:
        kwargs[cache_name(kwargs)] = shapes.cache
    sizes = facts.of(num_weights, draft), call.facts.of(num_weights, call.model)
    runner = DraftRunner(
        draft,
        ids,
        kwargs,
        tier=tier,
        vocab_size=vocab_sizes(call.model if translations is None else draft)[0],
        relative_cost=cost_ratio(sizes, (_num_layers(draft), _num_layers(call.model)))
        * load_factor(draft)
        / load_factor(call.model),
        device=call.input_ids.device,
        room=call.room,
        fixed=None if shapes is None else shapes.fixed,
        compiled=None if shapes is None else shapes.compiled,
        facts=facts,
    )
    for row, translation in enumerate(translations or ()):
        runner.keep(row, translation.fixed[-1:])
    return runner


def _num_layers(model: PreTrainedModel) -> int:
    return max(getattr(text_config(model.config), "num_hidden_layers", 1), 1)


def logits_processor_of(call: Call) -> LogitsProcessorFn | None:
    """The call's processors for nodes of the draft, `None` where nothing is sampled.

    Those of transformers that are pure, copied; others may count their calls and are for the text alone.
    """
    if not call.generation_config.do_sample:
        return None
    pure = [p for p in call.logits_processor if is_pure(p)]
    processors = processors_of_row(LogitsProcessorList(copy.deepcopy(pure)), None)
    takes_all, no_ids = all(map(takes_all_nodes, processors)), torch.empty((1, 0), dtype=torch.long, device=HOST)
    reads_text, called = not takes_all or any(map(reads_ids, processors)), in_order(processors)

    def process(texts: Callable[[], torch.Tensor], rows: torch.Tensor) -> torch.Tensor:
        ids = texts() if reads_text else no_ids
        if takes_all or len(rows) == 1:
            return called(ids, rows)
        return torch.cat([called(ids[node : node + 1], rows[node : node + 1]) for node in range(len(rows))])

    return process


def _decoder_kwargs(draft: PreTrainedModel, ids: torch.Tensor, mask: Any) -> dict[str, Any]:
    kwargs: dict[str, Any] = {"use_cache": True, **fresh_cache(draft)}
    positions = torch.arange(ids.shape[1], device=ids.device).expand_as(ids)
    if isinstance(mask, torch.Tensor) and mask.ndim == 2:
        kwargs["attention_mask"] = mask[:, -ids.shape[1] :].to(ids.device)
        positions = (kwargs["attention_mask"].long().cumsum(-1) - 1).clamp(min=0)
    if takes_position_ids(draft):
        kwargs["position_ids"] = positions
    return kwargs


def _with_targets_encoding(call: Call, draft: PreTrainedModel) -> dict[str, Any]:
    """Arguments with the target's encoder output, for a draft that is a decoder alone."""
    states = call.model_kwargs["encoder_outputs"][0].to(input_device(draft), draft.dtype)
    return {"use_cache": True, **fresh_cache(draft), "encoder_outputs": (states,)}
