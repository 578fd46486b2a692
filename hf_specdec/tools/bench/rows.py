"""Rows of a measurement: each is one way to call `generate`, made afresh for every call.

Knows nothing about timing or statistics. Rows come from names:

    reference()                             transformers' own generate, which all others are set against
    row("transformers:prompt_lookup")       transformers' prompt lookup with prompt_lookup_num_tokens=10
    row("transformers:assistant", loaded)  transformers' assisted generation with the model's assistant
    row("prompt_lookup")                    a method of this package at its defaults
    row('prompt_lookup={"num_branches": 4}')    the same with a configuration
    row("prompt_lookup:num_branches=4,pool=shared")     another way to write one
    row("eagle3", loaded)                   drafts with the model's head
    row("draft_model=[4]", loaded)          drafts with the model's assistant
    row("auto+draft_model", loaded)        auto with the model's assistant, which "auto" goes without
    row("auto+head", loaded)                auto with the model's head
    row("my_module:MyDrafter")              a Drafter or a transformers CandidateGenerator of your own
"""

import dataclasses
import inspect
import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Self

from transformers.generation import CandidateGenerator

from hf_specdec.api.enable import capability
from hf_specdec.distributed.placement import is_placed, read_devices
from hf_specdec.engine.draft_pairing import draft_capability
from hf_specdec.engine.head_pairing import check_head, own_head_of
from hf_specdec.errors import ConfigError, SpecError, unknown_name
from hf_specdec.kernels.quantization.weights import precision_of
from hf_specdec.methods.common.config import SpecConfig
from hf_specdec.methods.common.draft_head import DraftHead
from hf_specdec.methods.common.drafter import BaseDrafter
from hf_specdec.methods.common.entry import Method
from hf_specdec.methods.registry import METHODS, resolve
from hf_specdec.tools.bench.candidates import DecodeWithCandidates
from hf_specdec.tools.bench.loaded_model import LoadedModel
from hf_specdec.tools.bench.naming import imported, is_import, is_method, split_companion, split_config
from hf_specdec.tools.command_errors import within

REFERENCE = "generate"
OWN_PLAIN = "plain"  # this package's loop without drafts, whose kernels the other rows have
DEFAULT = "default"
LOOKUP, ASSISTANT, STATIC = "transformers:prompt_lookup", "transformers:assistant", "transformers:static"
LOOKUP_NUM_TOKENS = 10

Arguments = Callable[[Any], dict[str, Any]]


@dataclass(frozen=True, slots=True)
class Row:
    """One way to generate.

    Attributes:
        name (`str`): as the user writes it.
        kind (`str`): `"reference"`, `"transformers"`, `"method"`, `"drafter"` or `"candidates"`.
        arguments: from a streamer (or `None`) to the arguments of one call of `generate`.
        is_seed_exact (`bool`): whether it promises plain's tokens for plain's seed. Greedy tokens all rows promise.
        config (`dict[str, Any] | None`): its configuration, as JSON values.
    """

    name: str
    kind: str
    arguments: Arguments
    is_seed_exact: bool
    config: dict[str, Any] | None = None

    @classmethod
    def of_arguments(
        cls, name: str, kind: str, how: Mapping[str, Any], *, is_seed_exact: bool, config: dict[str, Any] | None = None
    ) -> Self:
        """A row whose calls differ in their streamers only; `how` holds the other arguments."""
        return cls(name, kind, lambda streamer: {**_streaming(streamer), **how}, is_seed_exact, config)

    def describe(self) -> dict[str, Any]:
        """Everything about the row that belongs in a document."""
        return {"name": self.name, "kind": self.kind, "is_seed_exact": self.is_seed_exact, "config": self.config}


def reference() -> Row:
    """transformers' own `generate` without speculation."""
    return Row.of_arguments(REFERENCE, "reference", {}, is_seed_exact=True)


def transformers_row(name: str, how: Mapping[str, Any], config: dict[str, Any] | None = None) -> Row:
    """A way of transformers' own to speculate; its loop draws in another order than plain sampling."""
    return Row.of_arguments(name, "transformers", how, is_seed_exact=False, config=config)


def default_rows(loaded: LoadedModel) -> tuple[list[Row], dict[str, str]]:
    """Every row that the model allows, and for those that it does not, why."""
    return named_rows([DEFAULT], loaded)


def named_rows(names: Iterable[str | Row], loaded: LoadedModel) -> tuple[list[Row], dict[str, str]]:
    """The reference and the rows called `names`, each once; `"default"` stands for every row that the model allows.

    A row may stand for its name.

    Returns:
        The rows, and the reasons for those of `"default"` that are left out, by name.

    Raises:
        ConfigError: a row named on its own does not exist, or the model lacks what it needs.
        CheckpointError, UnsupportedModelError: its draft or the model's checkpoint is of no use to it.
    """
    rows, left_out = {REFERENCE: reference()}, {}
    for name in names:
        if isinstance(name, Row):
            rows.setdefault(name.name, name)
            continue
        if name != DEFAULT:
            rows.setdefault(name, _named_row(name, loaded))
            continue
        for own in [LOOKUP, ASSISTANT, *METHODS]:
            try:
                rows.setdefault(own, row(own, loaded))
            except SpecError as error:
                left_out[own] = str(error)
    return list(rows.values()), left_out


def _named_row(name: str, loaded: LoadedModel) -> Row:
    """The row called `name`; errors begin with `row`."""
    with within("row"):
        return row(name, loaded)


def row(name: str, loaded: LoadedModel) -> Row:
    """The row called `name`."""
    if name == REFERENCE:
        return reference()
    if name == LOOKUP:
        how = {"prompt_lookup_num_tokens": LOOKUP_NUM_TOKENS}
        return transformers_row(name, how, how)
    if name == ASSISTANT:
        return _assistant_row(loaded)
    if name == STATIC:
        return transformers_row(name, {"cache_implementation": "static"})
    if is_import(name):
        return _own_row(name, loaded)
    if not is_method(name):
        raise unknown_name("row", name, [DEFAULT, REFERENCE, LOOKUP, ASSISTANT, STATIC, *METHODS])
    return _method_row(name, *split_config(name), loaded)


def _method_row(name: str, method_name: str, value: Any, loaded: LoadedModel) -> Row:
    method_name, companion = split_companion(method_name)
    method = resolve(method_name)
    takes = {None: True, "draft_model": method.takes_draft_model, "head": method.takes_draft_head}
    if not takes[companion]:
        raise ConfigError("row", f"must be a method that takes a {companion}", name, f"Write {method_name}.")
    config = method.config_class.parse(value, "row")
    described = json.loads(json.dumps(dataclasses.asdict(config), default=str))
    how: dict[str, Any] = {"spec_method": method.name, "spec_config": config}
    if method.needs_draft_head or companion == "head":
        how["assistant_model"] = head = _head_of(loaded, name, method)
        described |= {"head": head.name_or_path, "head_dtype": str(head.dtype).removeprefix("torch.")}
    own_head_of(loaded.model, method, config)  # loads what the method needs of the model's checkpoint
    if (method.needs_draft_model and config.drafting_layers is None) or companion == "draft_model":
        how |= _draft_of(loaded, name)
        described |= {"assistant": loaded.assistant_name, "assistant_dtype": precision_of(how["assistant_model"])}
    _check_devices(name, config, loaded)
    found = capability(loaded.model) if method.needs_tree else None
    if found is not None and found.tier != "tree":
        raise ConfigError(name, "must have a model that verifies trees", found.tier, f"It does not: {found.reason}.")
    return Row.of_arguments(name, "method", how, is_seed_exact=config.is_seed_exact, config=described)


def _head_of(loaded: LoadedModel, name: str, method: Method) -> DraftHead:
    """The model's draft head, if the method drafts with it."""
    if loaded.head is None:
        raise ConfigError(name, "must have a draft head", None, "Name one with --head, or measure the embedded target.")
    if method.name not in loaded.head.methods:
        kinds = " or ".join(loaded.head.methods)
        rule = f"must have a head that {method.name} can draft with, not one for {kinds}"
        raise ConfigError(name, rule, loaded.head.name_or_path, "Name one with --head.")
    check_head(loaded.model, loaded.head)
    return loaded.head


def _draft_of(loaded: LoadedModel, name: str) -> dict[str, Any]:
    """The model's assistant, if it can draft for it, with the tokenizers where it has one of its own."""
    if loaded.assistant is None:
        remedy = "Name one with --draft-model, or measure the embedded target."
        raise ConfigError(name, "must have a draft model", None, remedy)
    draft_capability(loaded.model, loaded.assistant, translates=loaded.assistant_tokenizer is not None)
    return loaded.assisted


def _check_devices(name: str, config: SpecConfig, loaded: LoadedModel) -> None:
    """Rows must not move the models under one another."""
    models = {"target": loaded.model, "draft": loaded.assistant}
    for role, devices in config.device_lists.items():
        field, model = config.device_fields[role], models[role]
        if model is not None and not is_placed(model, read_devices(devices, field)):
            rule = f"must name where the {role} is ({model.device}) in the row {name}"
            raise ConfigError(field, rule, devices, "Leave the list out; --device places the models.")


def _assistant_row(loaded: LoadedModel) -> Row:
    if loaded.assistant is None:
        remedy = "Name one with --draft-model, or measure the embedded target."
        raise ConfigError(ASSISTANT, "must have an assistant model", None, remedy)
    return transformers_row(ASSISTANT, loaded.assisted, {"assistant": loaded.assistant_name})


def _own_row(name: str, loaded: LoadedModel) -> Row:
    factory = imported(name)
    known = {"model": loaded.model, "tokenizer": loaded.tokenizer}
    wanted = inspect.signature(factory).parameters
    given = {key: value for key, value in known.items() if key in wanted}
    lacking = [
        key for key, p in wanted.items() if key not in given and p.default is p.empty and p.kind.name[:3] != "VAR"
    ]
    if lacking:
        remedy = "Wrap it in a function that needs none but model and tokenizer."
        raise ConfigError("row", f"must not need the arguments {', '.join(lacking)}", name, remedy)

    def make() -> Any:
        return factory(**given)

    made = make()
    if isinstance(made, BaseDrafter):
        return Row.of_arguments(name, "drafter", {"spec_method": make}, is_seed_exact=made.is_deterministic)
    if isinstance(made, CandidateGenerator):
        return Row(
            name,
            "candidates",
            lambda streamer: {**_streaming(streamer), "custom_generate": DecodeWithCandidates(make(), streamer)},
            is_seed_exact=False,
        )
    raise ConfigError("row", "must be a Drafter or a transformers CandidateGenerator", made, "Subclass one of them.")


def _streaming(streamer: Any) -> dict[str, Any]:
    return {} if streamer is None else {"streamer": streamer}
