"""`hf-specdec info`: what a model can do here."""

from hf_specdec.tools.cli import options
from hf_specdec.tools.cli.options import LoadOptions, MethodOptions
from hf_specdec.tools.cli.spread import spread


@spread
def info(
    *,
    loading: LoadOptions,
    method: MethodOptions,
    json: options.Json = False,
) -> None:
    """Say what a model can do on this machine and why.

    With a draft model or head, also whether the two go together.
    """
    from hf_specdec.tools.cli.facts import facts_of  # and with it torch
    from hf_specdec.tools.cli.models import load
    from hf_specdec.tools.cli.report import print_facts, print_json

    loaded, kwargs = load(loading, method)
    facts = facts_of(loaded.model, kwargs, as_json=json)
    print_json(facts) if json else print_facts(facts)
