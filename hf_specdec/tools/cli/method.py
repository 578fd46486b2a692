"""From the options that choose a method to its name and configuration. Knows nothing about models."""

import dataclasses
from collections.abc import Mapping
from pathlib import Path

from hf_specdec.call.arguments import NONE
from hf_specdec.errors import ConfigError
from hf_specdec.methods.common.config import SpecConfig
from hf_specdec.methods.common.entry import Method
from hf_specdec.methods.registry import METHODS, config_arguments, resolve
from hf_specdec.tools.command_errors import within

DRAFT_METHOD = "draft_model"
EMBEDDED = (DRAFT_METHOD, "eagle3")  # for which the embedded target has a draft
AUTO = DEFAULT_METHOD = "auto"


def describe_methods() -> str:
    """The methods in one sentence, for help texts."""
    return "; ".join(f"{' or '.join((method.name, *method.aliases))}: {method.summary}" for method in METHODS.values())


def read_method(
    name: str | None,
    *,
    list_forms: Mapping[str, str | None],
    spec_config: str | None,
    engine: str | None,
    draft_model: str | None = None,
    memory: Path | None = None,
) -> tuple[str | None, SpecConfig | None]:
    """The method's own name and its configuration; `(None, None)` for transformers' own loop.

    Args:
        name: what `--spec-method` says; without it, the method of the other options, else auto.
        list_forms: what was given to the options named after arguments of `generate`, such as `lookahead_config`.
        draft_model: `--draft-model`, which chooses a method like a list form.
        memory: `--spec-memory`, which chooses `auto`.
    """
    forms = {argument: text for argument, text in list_forms.items() if text is not None}
    if name == NONE:
        own = {_option(argument): text for argument, text in forms.items()}
        for option, value in {"--spec-config": spec_config, **own, "--engine": engine, "--spec-memory": memory}.items():
            if value is not None:
                raise ConfigError(option, "must come with a method", str(value), f"Use --spec-method {DEFAULT_METHOD}.")
        return None, None
    method = resolve(name) if name is not None else _method_of(forms, draft_model, memory)
    if memory is not None and method.name != AUTO:
        rule = f"must come with --spec-method {AUTO}"
        raise ConfigError("--spec-memory", rule, str(memory), "Other methods keep no such memory.")
    config = _config(method, forms, spec_config)
    if engine is not None:
        config = dataclasses.replace(config, engine=engine)  # type: ignore[arg-type]  # checked by the dataclass
    return method.name, config


def loads_draft(method: str | None, config: SpecConfig | None, draft_model: str | None) -> bool:
    """Tell calls with a second model to load: one that is named, or the embedded one."""
    drafts_itself = config is not None and config.drafting_layers is not None
    return draft_model is not None or (method is not None and resolve(method).needs_assistant and not drafts_itself)


def check_draft_options(
    method: str | None,
    config: SpecConfig | None,
    *,
    model: str | None,
    draft_model: str | None,
    draft_dtype: str | None,
) -> None:
    """Raise where an option of the draft model comes with a method that has none, or a draft is missing."""
    needs_draft = loads_draft(method, config, None)
    if needs_draft and draft_model is None and (model is not None or method not in EMBEDDED):
        rule = f"must be given with {'--model and ' if method in EMBEDDED else ''}--spec-method {method}"
        is_head = method is not None and resolve(method).needs_draft_head
        kind = "draft head for this model" if is_head else "smaller model of the same vocabulary"
        raise ConfigError("--draft-model", rule, None, f"Name a {kind}.")
    takers = [one.name for one in METHODS.values() if one.takes_draft_model or one.takes_draft_head]
    if draft_model is not None and method not in takers:
        wanted = " or ".join(f"--spec-method {name}" for name in takers)
        raise ConfigError(
            "--draft-model", f"must come with {wanted}", draft_model, "Other methods need no second model."
        )
    if draft_dtype is not None and draft_model is None and not needs_draft:
        rule = f"must come with --draft-model or --spec-method {DRAFT_METHOD}"
        raise ConfigError("--draft-dtype", rule, draft_dtype, "Without a second model there is nothing to load.")


def _method_of(forms: Mapping[str, str], draft_model: str | None, memory: Path | None) -> Method:
    """The method that is meant where none is named."""
    if forms:
        return config_arguments()[next(iter(forms))]
    if memory is not None:
        return resolve(AUTO)
    return resolve(DRAFT_METHOD if draft_model is not None else DEFAULT_METHOD)


def _config(method: Method, forms: Mapping[str, str], spec_config: str | None) -> SpecConfig:
    """The configuration from the one option that holds it."""
    other = None if spec_config is None else "--spec-config"
    for argument, text in forms.items():
        if argument not in method.config_arguments:
            rule = f"must come with --spec-method {config_arguments()[argument].name}"
            raise ConfigError(_option(argument), rule, text, "Use --spec-config for other methods.")
        if other is not None:
            raise ConfigError(_option(argument), f"must not come with {other}", text, "Give only one of the two.")
        other = _option(argument)
    field, given = next(iter(forms.items())) if forms else ("spec_config", spec_config)
    with within(field):
        return method.config_class.parse(given, field)


def _option(argument: str) -> str:
    return f"--{argument.replace('_', '-')}"
