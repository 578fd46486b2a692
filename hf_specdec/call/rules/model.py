"""Rules about the model alone: its class, code from elsewhere in it, and what its probe has found."""

from hf_specdec import compat
from hf_specdec.call.facts import Facts
from hf_specdec.call.request import Request
from hf_specdec.compat.fingerprint import foreign_code as reason_of_foreign_code

OWN_LOOP = "its class decodes by a loop of its own"


def own_loop(facts: Facts, request: Request) -> str | None:
    """The class replaces the loop that drafts would enter."""
    return OWN_LOOP if compat.has_own_loop(facts.model) else None


def foreign_code(facts: Facts, request: Request) -> str | None:
    """Code of the caller's may compress or evict keys and values, so that columns are no longer tokens of the text."""
    return reason_of_foreign_code(facts.model)


def one_token_a_forward(facts: Facts, request: Request) -> str | None:
    """The probe found no forward of several tokens right."""
    return facts.probed.capability.reason if facts.tier == "plain" else None
