"""Rows of a measurement: each is one way to call `generate`.

transformers generate                   transformers' own `generate`; all speeds are relative to it
plain, same kernels                     one token a step by this package; all texts are compared with its texts
transformers:prompt_lookup              transformers' prompt lookup
transformers:assistant                  transformers' assisted generation with the draft model
auto                                    a method of this package
auto:num_nodes=16,pool=request          the same with a configuration
auto+draft_model, auto+head             the same with the draft model or the head
"""

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from hf_specdec.errors import ConfigError, unknown_name
from hf_specdec.methods.registry import METHODS, resolve
from hf_specdec.tools.bench.loaded_model import LoadedModel

TRANSFORMERS, PLAIN = "transformers generate", "plain, same kernels"
LOOKUP, ASSISTANT = "transformers:prompt_lookup", "transformers:assistant"
LOOKUP_NUM_TOKENS = 10
DRAFTS = ("draft_model", "head")  # attributes of the loaded model


@dataclass(frozen=True, slots=True)
class Row:
    """One way to generate.

    Attributes:
        name (`str`): its name in records and tables.
        kwargs (`Mapping[str, Any]`): arguments of `generate`.
        is_transformers (`bool`): whether `generate` of the model's class is called, as if it were not enabled.
        is_seed_exact (`bool`): whether a seed's text is that of plain sampling. Greedy texts always are.
    """

    name: str
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    is_transformers: bool = False
    is_seed_exact: bool = True


def base_rows() -> list[Row]:
    """The two rows that every measurement has."""
    return [Row(TRANSFORMERS, is_transformers=True), Row(PLAIN, {"spec_method": "plain"})]


def default_names(loaded: LoadedModel) -> list[str]:
    """Names of the rows that say most of a model."""
    names = [LOOKUP, "prompt_lookup", "lookahead", "auto"]
    if loaded.draft_model is not None:
        names += [ASSISTANT, "draft_model"]
    return names if loaded.head is None else [*names, loaded.head.methods[0], "auto+head"]


def make_rows(names: Iterable[str], loaded: LoadedModel) -> list[Row]:
    """Make the base rows, and those called `names`, each once.

    Raises:
        ConfigError: there is no such row, or the model lacks the draft that it needs.
    """
    rows = {row.name: row for row in base_rows()}
    for name in names:
        rows.setdefault(name, make_row(name, loaded))
    return list(rows.values())


def make_row(name: str, loaded: LoadedModel) -> Row:
    """Make the row called `name`; raises as `make_rows`."""
    if name == LOOKUP:
        return Row(name, {"prompt_lookup_num_tokens": LOOKUP_NUM_TOKENS}, is_transformers=True, is_seed_exact=False)
    if name == ASSISTANT:
        return Row(name, _draft_kwargs(name, "draft_model", loaded), is_transformers=True, is_seed_exact=False)
    method_and_draft, _, text = name.partition(":")
    method_name, _, draft = method_and_draft.partition("+")
    if not any(method_name in (method.name, *method.aliases) for method in METHODS.values()):
        raise unknown_name("row", name, [LOOKUP, ASSISTANT, *METHODS])
    method = resolve(method_name)
    config = method.config_class.parse(_read_config(name, text) or None, "row")
    kwargs = {"spec_method": method.name, "spec_config": config}
    if method.needs_draft_head:
        draft = "head"
    elif method.needs_draft_model:
        draft = "draft_model"
    if draft:
        kwargs |= _draft_kwargs(name, draft, loaded)
    return Row(name, kwargs, is_seed_exact=config.is_seed_exact)


def _draft_kwargs(name: str, draft: str, loaded: LoadedModel) -> dict[str, Any]:
    """Arguments that bring a draft model, with the tokenizers where it has its own, or a head."""
    if draft not in DRAFTS:
        raise unknown_name("row", draft, DRAFTS)
    if getattr(loaded, draft) is None:
        kind = draft.replace("_", " ")
        raise ConfigError("row", f"must have a {kind}", name, "Name one with --assistant-model.")
    return loaded.assistant_kwargs(draft)


def _read_config(name: str, text: str) -> dict[str, Any]:
    """Fields and values of `field=value,field=value`; a value that is no JSON is a text."""
    config = {}
    for part in filter(None, text.split(",")):
        key, equals, value = part.partition("=")
        if not equals:
            raise ConfigError("row", "must be METHOD:FIELD=VALUE,FIELD=VALUE", name, "For example auto:num_nodes=16.")
        try:
            config[key] = json.loads(value)
        except ValueError:
            config[key] = value
    return config
