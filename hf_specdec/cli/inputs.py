"""From what the user typed to a prompt, a method and a model. Knows nothing about output.

method, config = read_method("prompt_lookup", spec_config=None, prompt_lookup_config="[10,2,[0]]", engine=None)
model, tokenizer = load(None, "auto", config)
"""

import dataclasses
import json
import sys
from typing import Any

import torch
from transformers import AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase, logging

import hf_specdec
from hf_specdec import embedded
from hf_specdec.cli.placement import place
from hf_specdec.config import SpecConfig
from hf_specdec.errors import ConfigError
from hf_specdec.methods import resolve

__all__ = ["encode", "load", "read_method", "read_prompt", "read_sampling", "set_threads"]


def read_prompt(argument: str | None) -> str | None:
    """The prompt from the argument or stdin; `None` where neither says anything."""
    if argument is not None and argument != "-":
        return argument
    if argument == "-" or not sys.stdin.isatty():
        piped = sys.stdin.read()
        return piped if piped or argument == "-" else None
    return None


def read_method(
    name: str, *, spec_config: str | None, prompt_lookup_config: str | None, engine: str | None
) -> tuple[str | None, SpecConfig | None]:
    """The method's own name and its configuration; `(None, None)` for transformers' own loop.

    Raises:
        ConfigError: an unknown name or key, or options that contradict each other.
    """
    if name == "none":
        options = {"--spec-config": spec_config, "--prompt-lookup-config": prompt_lookup_config, "--engine": engine}
        for option, value in options.items():
            if value is not None:
                raise ConfigError(option, "must come with a method", value, "Use --spec-method prompt_lookup.")
        return None, None
    method = resolve(name)
    if prompt_lookup_config is None:
        config = method.config_class.parse(_from_json(spec_config), "spec_config")
    else:
        _check_list_form(method.name, spec_config, prompt_lookup_config)
        config = method.config_class.parse(prompt_lookup_config, "prompt_lookup_config")
    if engine is not None:
        config = dataclasses.replace(config, engine=engine)  # type: ignore[arg-type]  # checked by the dataclass
    return method.name, config


def read_sampling(do_sample: bool, **options: float | None) -> dict[str, Any]:
    """Keyword arguments of `generate` for sampling.

    Raises:
        ConfigError: a sampling option without `--do-sample`.
    """
    given = {name: value for name, value in options.items() if value is not None}
    if given and not do_sample:
        name, value = next(iter(given.items()))
        raise ConfigError(f"--{name.replace('_', '-')}", "must come with --do-sample", value, "Add --do-sample.")
    return {"do_sample": do_sample, **given}


def set_threads(model: str | None, threads: int | None) -> None:
    """Use `threads` CPU threads; without a number, one for the embedded target, which is too small to share."""
    if threads is None and model is None:
        threads = 1
    if threads is not None:
        torch.set_num_threads(threads)


def load(model: str | None, dtype: str, config: SpecConfig | None) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """The model, enabled and placed, and its tokenizer.

    Raises:
        CheckpointError: the folder is missing or incomplete.
        ConfigError: an unknown precision or device.
    """
    path = model if model is not None else embedded.path("target")
    if model is None or not sys.stderr.isatty():
        logging.disable_progress_bar()
    device_map, max_memory = place(getattr(config, "device_list", None))
    loaded = hf_specdec.AutoModelForCausalLM.from_pretrained(
        path, precision=dtype, device_map=device_map, max_memory=max_memory
    )
    return loaded, AutoTokenizer.from_pretrained(path)


def encode(tokenizer: PreTrainedTokenizerBase, prompt: str, device: torch.device) -> dict[str, torch.Tensor]:
    """Token ids and mask of one prompt, `(1, length)` each.

    Raises:
        ConfigError: the prompt holds no token.
    """
    encoded = tokenizer(prompt, return_tensors="pt")
    if encoded["input_ids"].shape[1] == 0:
        raise ConfigError("PROMPT", "must hold at least one token", prompt, "Type some text to continue.")
    return {name: encoded[name].to(device) for name in ("input_ids", "attention_mask")}


def _check_list_form(method: str, spec_config: str | None, prompt_lookup_config: str) -> None:
    option = "--prompt-lookup-config"
    if method != "prompt_lookup":
        remedy = "Use --spec-config for other methods."
        raise ConfigError(option, "must come with --spec-method prompt_lookup", prompt_lookup_config, remedy)
    if spec_config is not None:
        remedy = "Give only one of the two."
        raise ConfigError(option, "must not come with --spec-config", prompt_lookup_config, remedy)


def _from_json(text: str | None) -> Any:
    """The value of a JSON text; the text itself where it is not JSON, for `parse` to read as a Python literal."""
    try:
        return None if text is None else json.loads(text)
    except json.JSONDecodeError:
        return text
