"""Rules about the model, at the lengths of the call, and about what drafts for it: a network, or transformers' loop."""

from hf_specdec.call.request import Request
from hf_specdec.call.rules.inputs import rows_in_step
from hf_specdec.compat.attention import cache_drop_length, rotary_modules, rotary_switch, scaled_length
from hf_specdec.compat.caches import cached_length
from hf_specdec.compat.devices import is_shared
from hf_specdec.compat.fingerprint import foreign_code as reason_of_foreign_code
from hf_specdec.compat.generation import fresh_cache, has_foreign_inputs, has_own_loop
from hf_specdec.compat.models import has_virtual_tokens, is_recurrent
from hf_specdec.engine.head_pairing import check_head
from hf_specdec.engine.sampling.row_processors import is_pure
from hf_specdec.errors import ConfigError, UnsupportedModelError
from hf_specdec.methods.common.draft_head import DraftHead
from hf_specdec.methods.registry import METHODS

OWN_LOOP = "its class decodes by a loop of its own"
MOST_COLUMNS = 512  # of a step, whatever drafts: lookahead's widest windows have some hundred


def own_loop(request: Request) -> str | None:
    """The class replaces the loop that drafts would enter."""
    return OWN_LOOP if has_own_loop(request.model) else None


def foreign_code(request: Request) -> str | None:
    """Code of the caller's may compress or evict keys and values, so that columns are no longer tokens of the text."""
    return reason_of_foreign_code(request.model)


def foreign_inputs(request: Request) -> str | None:
    """Code from outside of transformers may prepare other inputs at any length of the text."""
    if has_foreign_inputs(request.model):
        return "code of its own prepares its inputs, and may prepare others at any length of the text"
    return None


def one_token_a_forward(request: Request) -> str | None:
    """The probe found no forward of several tokens right."""
    return request.probed.capability.reason if request.tier == "plain" else None


def scaled_attention(request: Request) -> str | None:
    """Attention goes by the number of columns within the call's texts, or within a step's after them."""
    length = request.facts.of(scaled_length, request.model)
    if length is None or not request.call.reaches(length - MOST_COLUMNS):
        return None
    return "its attention goes by the columns of the cache, of which a step has more than its text"


def dropped_cache(request: Request) -> str | None:
    """The model's class may compute its cache anew within the text, or forget the text."""
    length = request.facts.of(cache_drop_length, request.model)
    if length is None or not request.call.reaches(length + 1):
        return None
    return f"its class may compute the cache anew at {length + 1} tokens, within this text"


def rotary_frequencies(request: Request) -> str | None:
    """Rotary frequencies change within the text, or have changed before it."""
    switch = rotary_switch(request.facts.of(rotary_modules, request.model))
    if switch is None or not request.call.reaches(switch + 1):
        return None
    return "its rotary frequencies follow the text's length, which a forward of several tokens does not"


UNREAD = "the draft model has no positions for all of its prompt"
ONE_SEQUENCE = "transformers' assisted decoding takes one sequence, in one process"
NEW_TEXT = "transformers' assisted decoding takes a text of token ids that begins an own cache of keys and values"


def check_draft(request: Request, field: str = "assistant_model", hint: str = "") -> None:
    """Raise where the method needs a draft model and the call brings none.

    Args:
        field: name of the draft model in the call.
        hint: comes before the remedy where it is missing.

    Raises:
        ConfigError: `assistant_model` is missing.
    """
    method = request.method
    if request.assistant_model is not None or not method.needs_assistant:
        return
    remedy = "Pass a smaller model of the same vocabulary."
    if method.needs_draft_head:
        remedy = "Pass hf_specdec.AutoDraftHead.from_pretrained(path) of a head for this model."
    raise ConfigError(field, f'must be given with spec_method="{method.name}"', None, f"{hint}{remedy}")


def assisted_loop(request: Request) -> str | None:
    """transformers' assisted decoding, where it is asked for, cannot take the call."""
    if not request.is_assisted:
        return None
    if request.num_rows > 1 or is_shared(request.model):
        return ONE_SEQUENCE
    call, model = request.call, request.model
    is_new = not (call.reads_embeddings or cached_length(call.cache) or has_virtual_tokens(model))
    if not is_new or request.has_static_cache or is_recurrent(model) or not fresh_cache(model):
        return NEW_TEXT
    name = next((type(processor).__name__ for processor in call.logits_processor if not is_pure(processor)), None)
    return f"{name} may keep state, in which transformers' assisted decoding has rejected tokens" if name else None


def chains_only(request: Request) -> None:
    """Refuse a method that is of no use on a model that verifies chains only."""
    if request.tier == "tree" or not request.method.needs_tree:
        return
    others = ", ".join(repr(name) for name, method in METHODS.items() if not method.needs_tree and name != "plain")
    raise UnsupportedModelError(
        f"spec_method={request.method.name!r} needs a model that verifies trees; {request.model_name} takes chains "
        f"only: {request.probed.capability.reason}. Methods that work with it: {others}."
    )


def network(request: Request) -> None:
    """Refuse a draft model or head that does not go with the target, and a prompt without text that it could read."""
    if (drafts := request.network) is None:
        return
    is_head = isinstance(drafts, DraftHead)
    if is_head:
        check_head(request.model, drafts)
    else:
        request.draft  # noqa: B018 - the look-up checks that both models go together
    if request.call.input_ids.shape[1] == 0:
        rule = f"must be unset with a draft {'head' if is_head else 'model'}"
        remedy = f"Pass input_ids, which the {'head' if is_head else 'draft'} reads too."
        raise ConfigError("inputs_embeds", rule, "given", remedy)


def draft_of_rows(request: Request) -> str | None:
    """A draft model cannot follow rows that each have a length of their own."""
    draft = request.network
    if request.num_rows == 1 or draft is None or isinstance(draft, DraftHead) or not request.drafts_with_network:
        return None
    reason = rows_in_step(draft, request.draft[0])
    return None if reason is None else f"of {type(draft).__name__}, which drafts: {reason}"


def unread_prompt(request: Request) -> str | None:
    """The network has no positions for the prompt, and the method drafts with nothing else."""
    if not request.method.needs_assistant or request.network is None or request.drafts_with_network:
        return None
    return UNREAD
