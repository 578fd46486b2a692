"""Rules about the model alone: its class, its adapters, and what its probe has found."""

from hf_specdec import compat
from hf_specdec.call.facts import Facts
from hf_specdec.call.request import Request

OWN_LOOP = "its class decodes by a loop of its own"


def own_loop(facts: Facts, request: Request) -> str | None:
    """The class replaces the loop that drafts would enter."""
    return OWN_LOOP if compat.has_own_loop(facts.model) else None


def adapters_by_position(facts: Facts, request: Request) -> str | None:
    """PEFT's aLoRA acts from a position on."""
    if compat.places_adapters(facts.model):
        return (
            "PEFT's aLoRA counts tokens from a forward's end; a LoRA adapter without alora_invocation_tokens does not"
        )
    return None


def hooked_cache(facts: Facts, request: Request) -> str | None:
    """Code of the caller's may compress or evict keys and values, so that columns are no longer tokens of the text."""
    if (name := compat.code_with_cache(facts.model)) is not None:
        return f"the {name} reads the cache and may change it"
    return None


def one_token_a_forward(facts: Facts, request: Request) -> str | None:
    """The probe found no forward of several tokens right."""
    return facts.found.capability.reason if facts.tier == "plain" else None
