"""`hf-specdec info`: what a model can do here."""

from hf_specdec.tools.cli import options
from hf_specdec.tools.cli.options import LoadOptions
from hf_specdec.tools.cli.spread import spread


@spread
def info(
    *,
    loading: LoadOptions,
    assistant_model: options.AssistantModel = None,
    assistant_dtype: options.AssistantDtype = None,
    json: options.Json = False,
) -> None:
    """Say what a model can do on this machine and why.

    With a draft model or head, also whether the two go together.
    """
    from hf_specdec.tools.cli.facts import facts_of  # and with it torch
    from hf_specdec.tools.cli.models import load, load_assistant
    from hf_specdec.tools.cli.report import print_facts, print_json

    target, pair = load(loading), None
    if assistant_model is not None:
        pair = load_assistant(assistant_model, assistant_dtype or loading.dtype, target.model, target.tokenizer)
    facts = facts_of(target.model, pair, as_json=json)
    print_json(facts) if json else print_facts(facts)
