"""Reads the draft model or head of a call, and the tokenizers of both models."""

from typing import Any

from transformers import GenerationMixin, PreTrainedModel

from hf_specdec.compat.devices import is_dispatched
from hf_specdec.compat.models import adds_virtual_tokens, generation_model
from hf_specdec.errors import ConfigError
from hf_specdec.methods.common.config import SpecConfig
from hf_specdec.methods.common.draft_head import DraftHead
from hf_specdec.methods.common.entry import Method
from hf_specdec.methods.common.translation import check_tokenizers, share_token_ids


def read_draft(
    arguments: dict[str, Any], method: Method, config: SpecConfig, assistant: Any
) -> tuple[Any, tuple[Any, Any] | None]:
    """The draft model or head that the method drafts with, and the tokenizers of both models where they differ.

    Args:
        arguments: of `generate`; the tokenizer of the draft is removed.
        assistant: the draft among them.

    Raises:
        ConfigError: the draft is of a kind that the method does not draft with, or a tokenizer is missing, or
            probabilities would be compared, which differ between vocabularies.
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
    if is_head:
        rule = "must be unset with a draft head, which drafts the target's tokens"
        raise ConfigError("assistant_tokenizer", rule, type(tokenizer).__name__, "Leave it out.")
    check_tokenizers(arguments.get("tokenizer"), tokenizer)
    if share_token_ids(arguments["tokenizer"], tokenizer):
        return network, None
    if not method.translates:
        rule = f"must be unset with spec_method={method.name!r}, which scores the target's own tokens"
        remedy = 'Use spec_method="draft_model", which translates drafts.'
        raise ConfigError("assistant_tokenizer", rule, type(tokenizer).__name__, remedy)
    if config.draws_drafts:
        rule = "must be False with an assistant_tokenizer: probabilities of two vocabularies cannot be compared"
        raise ConfigError("use_logits", rule, True, "Leave it out: drafts are compared by token.")
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
    if not isinstance(network, PreTrainedModel):
        refuse("must be a transformers model", "Load it with from_pretrained.")
    if not isinstance(network, GenerationMixin) or not network.can_generate():
        refuse("must be a model that generates", "Load it with hf_specdec.AutoModelForCausalLM.")
    if network.device.type == "meta" and not is_dispatched(network):
        remedy = "Load its weights with from_pretrained."
        refuse("must have weights, not be on the meta device", remedy, network.device)
    if adds_virtual_tokens(assistant):
        remedy = "Pass its get_base_model(), which drafts without them, or a draft with a LoRA adapter."
        refuse("must have no virtual tokens of PEFT's", remedy)
