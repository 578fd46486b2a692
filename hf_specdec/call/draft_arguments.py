"""Reads the draft model of a call and the tokenizers of both models, which transformers' own loop must not see."""

from typing import Any

from transformers import GenerationMixin, PreTrainedModel

from hf_specdec.compat import adds_virtual_tokens, generation_model
from hf_specdec.compat.devices import is_dispatched
from hf_specdec.errors import ConfigError
from hf_specdec.methods.common.config import SpecConfig
from hf_specdec.methods.common.draft_head import DraftHead
from hf_specdec.methods.common.entry import Method
from hf_specdec.methods.common.translation import are_alike, check_tokenizers
from hf_specdec.methods.registry import as_head


def read_draft(arguments: dict[str, Any], method: Method, config: SpecConfig) -> tuple[Any, tuple[Any, Any] | None]:
    """The draft model or head that the method drafts with, and the tokenizers of both models where they differ.

    Args:
        arguments: of `generate`; those that the method takes are removed.

    Raises:
        ConfigError: the draft is of a kind that the method does not draft with, or a tokenizer is missing.
    """
    assistant = _assistant_model(arguments, method, config)
    return assistant, None if assistant is None else _tokenizers(arguments, assistant, config)


def _tokenizers(arguments: dict[str, Any], assistant: Any, config: SpecConfig) -> tuple[Any, Any] | None:
    """The target's tokenizer and the draft model's; `None` where the draft reads the target's.

    Raises:
        ConfigError: one is missing, the draft is a head, or probabilities would be compared, which differ between
            vocabularies.
    """
    tokenizer = arguments.pop("assistant_tokenizer", None)
    if tokenizer is None:
        return None
    if isinstance(assistant, DraftHead):
        rule = "must be unset with a draft head, which drafts the target's tokens"
        raise ConfigError("assistant_tokenizer", rule, type(tokenizer).__name__, "Leave it out.")
    check_tokenizers(arguments.get("tokenizer"), tokenizer)
    if are_alike(arguments["tokenizer"], tokenizer):
        return None
    if config.draws_drafts:
        rule = "must be False with an assistant_tokenizer: probabilities of two vocabularies cannot be compared"
        raise ConfigError("use_logits", rule, True, "Leave it out: drafts are compared by token.")
    return arguments["tokenizer"], tokenizer


def _assistant_model(arguments: dict[str, Any], method: Method, config: SpecConfig) -> Any:
    """The draft model or head.

    Raises:
        ConfigError: it is none, or of a kind that the method does not draft with.
    """
    if not method.takes_draft_model and not method.takes_draft_head:
        return None
    assistant = arguments.pop("assistant_model", None)
    if assistant is None:
        return None
    inner = generation_model(assistant)
    if (head := as_head(inner)) is not None:
        if method.name in head.methods:
            if config.engine != "loop":
                remedy = "Leave it out: transformers' loop drafts without it."
                raise ConfigError("engine", 'must be "loop" with a draft head', config.engine, remedy)
            return head
        rule = f"must be of another kind with spec_method={method.name!r}"
        remedy = f'Use spec_method="{head.methods[0]}" for a head of this kind.'
        raise ConfigError("assistant_model", rule, type(assistant).__name__, remedy)
    if not method.takes_draft_model:
        rule = f"must be a draft head with spec_method={method.name!r}"
        remedy = 'Load it with hf_specdec.AutoDraftHead, or use spec_method="draft_model" for a model.'
        raise ConfigError("assistant_model", rule, type(assistant).__name__, remedy)
    if not isinstance(inner, PreTrainedModel):
        raise ConfigError(
            "assistant_model", "must be a transformers model", type(assistant).__name__, "Load it with from_pretrained."
        )
    if not isinstance(inner, GenerationMixin) or not inner.can_generate():
        remedy = "Load it with hf_specdec.AutoModelForCausalLM."
        raise ConfigError("assistant_model", "must be a model that generates", type(assistant).__name__, remedy)
    if inner.device.type == "meta" and not is_dispatched(inner):
        remedy = "Load its weights with from_pretrained."
        raise ConfigError("assistant_model", "must have weights, not be on the meta device", inner.device, remedy)
    if adds_virtual_tokens(assistant):
        remedy = "Pass its get_base_model(), which drafts without them, or a draft with a LoRA adapter."
        raise ConfigError("assistant_model", "must have no virtual tokens of PEFT's", type(assistant).__name__, remedy)
    return inner
