"""Refusals of a method that the model, its inputs or the network that drafts cannot serve."""

from transformers import PreTrainedModel

from hf_specdec import compat
from hf_specdec.cache.spec_cache import SpecCache
from hf_specdec.call.facts import Facts
from hf_specdec.call.request import Request
from hf_specdec.engine.head_pairing import check_head
from hf_specdec.errors import ConfigError, UnsupportedModelError, counted
from hf_specdec.forward.networks.exit_runner import OWN_CACHE
from hf_specdec.forward.networks.layer_cut import check_forwards, layers_of, path_to_layers
from hf_specdec.methods.common.draft_head import DraftHead
from hf_specdec.methods.registry import METHODS

SMALLER = "Pass a smaller model with the same tokenizer as assistant_model."
UNREAD = "the draft model has no positions for all of its prompt"


def draft_model(facts: Facts, request: Request) -> None:
    """Refuse a call without the network that its method needs, or with two."""
    check_draft_given(request)


def check_draft_given(request: Request, field: str = "assistant_model", hint: str = "") -> None:
    """Raise where the method needs a draft model and the call brings none, or two ways to draft.

    Args:
        field: name of the draft model in the call.
        hint: comes before the remedy where it is missing.

    Raises:
        ConfigError: `assistant_model` is missing, or comes with `exit_layer`.
    """
    method, layers = request.method, request.config.drafting_layers
    if layers is not None and request.assistant_model is not None:
        raise ConfigError("exit_layer", "must be unset with an assistant_model", layers, "Give only one of the two.")
    if method is None or request.assistant_model is not None or layers is not None:
        return
    rule = f'must be given with spec_method="{method.name}"'
    if method.needs_draft_head:
        remedy = "Pass hf_specdec.AutoDraftHead.from_pretrained(path) of a head for this model."
        raise ConfigError(field, rule, None, f"{hint}{remedy}")
    if method.needs_draft_model:
        first_layers = 'spec_config={"exit_layer": ...} or hf_specdec.self_draft(model, layers=...)'
        remedy = f"Pass a smaller model of the same vocabulary, or draft with the first layers: {first_layers}."
        raise ConfigError(field, rule, None, f"{hint}{remedy}")


def chains_only(facts: Facts, request: Request) -> None:
    """Refuse a method that is of no use on a model that verifies chains only."""
    if facts.tier == "tree" or request.method is None or not request.method.needs_tree:
        return
    others = ", ".join(repr(name) for name, method in METHODS.items() if not method.needs_tree and name != "plain")
    raise UnsupportedModelError(
        f"spec_method={request.name!r} needs a model that verifies trees; {type(facts.model).__name__} takes chains "
        f"only: {facts.probed.capability.reason}. Methods that work with it: {others}."
    )


def first_layers(facts: Facts, request: Request) -> None:
    """Refuse a model whose first layers cannot draft for it: what can be seen without trying comes first."""
    if (layers := request.config.drafting_layers) is None:
        return
    call, model, name = facts.call, facts.model, type(facts.model).__name__
    if model.config.is_encoder_decoder:
        rule = f"must be unset for an encoder-decoder such as {name}"
        raise ConfigError("exit_layer", rule, layers, "Pass a smaller encoder-decoder as assistant_model.")
    try:
        path = call.facts.of(path_to_layers, model)
        check_forwards(model, path)
        most = len(layers_of(model, path)) - 1
    except UnsupportedModelError as error:
        what = str(error).split(", so that")[0]
        raise ConfigError("exit_layer", f"must be unset where {what}", layers, SMALLER) from error
    if layers > most:
        rule = f"must be from 1 to {most}, one less than the layers of {name}"
        raise ConfigError("exit_layer", rule, layers, "A quarter of the layers is a start.")
    if not call.facts.of(_keeps_keys_alone, model):
        rule = f"must be unset for {name}, whose cache holds more than keys and values"
        raise ConfigError("exit_layer", rule, layers, OWN_CACHE)
    if isinstance(call.cache, compat.DynamicCache) and not SpecCache.takes(call.cache):
        rule = f"must be unset with this {type(call.cache).__name__}, which may hold more than keys and values"
        raise ConfigError("exit_layer", rule, layers, OWN_CACHE)
    if (refusal := facts.probed.exit_reason(model, layers)) is not None:
        rule = f"must be unset for {name}: after {counted(layers, 'layer')}, {refusal}"
        raise ConfigError("exit_layer", rule, layers, OWN_CACHE)


def _keeps_keys_alone(model: PreTrainedModel) -> bool:
    """Returns whether the model's cache holds keys and values, and nothing besides them."""
    cache = compat.fresh_cache(model).get(compat.CACHE)
    return cache is not None and SpecCache.adopt(cache) is not None


def unread_prompt(facts: Facts, request: Request) -> str | None:
    """The network has no positions for the prompt, and the method drafts with nothing else."""
    if request.method is None or not request.method.needs_assistant or facts.network(request) is None:
        return None
    return None if facts.drafts_with_network(request) else UNREAD


def network(facts: Facts, request: Request) -> None:
    """Refuse a draft model or head that does not go with the target, and a prompt without text that it could read."""
    if (drafts := facts.network(request)) is None:
        return
    kind = "head" if isinstance(drafts, DraftHead) else "model"
    if isinstance(drafts, DraftHead):
        check_head(facts.model, drafts)
    else:
        facts.draft(request)
    if facts.call.input_ids.shape[1] == 0:
        remedy = f"Pass input_ids, which the {'head' if kind == 'head' else 'draft'} reads too."
        raise ConfigError("inputs_embeds", f"must be unset with a draft {kind}", "given", remedy)
