"""From what the user typed to a prompt and models. Knows nothing about output."""

import os
import sys
from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase, logging

import hf_specdec
from hf_specdec import embedded, loading
from hf_specdec.checkpoint_tokenizers import load_tokenizer
from hf_specdec.cli.where import Where
from hf_specdec.distributed.placement import place
from hf_specdec.errors import ConfigError, MissingExtraError
from hf_specdec.files import lone_surrogate
from hf_specdec.methods.config import SpecConfig
from hf_specdec.methods.registry import resolve

__all__ = [
    "check_seed",
    "encode",
    "load",
    "load_draft",
    "read_prompt",
    "read_sampling",
    "set_threads",
]

MAX_SEED = 1 << 62


def read_prompt(argument: str | None) -> str | None:
    """The prompt from the argument or stdin; `None` where neither says anything.

    Raises:
        ConfigError: stdin is asked for and closed, or is no text.
    """
    if argument is not None and argument != "-":
        return argument
    if sys.stdin is None:  # closed
        if argument == "-":
            raise ConfigError("PROMPT", "must be text where stdin is closed", argument, "Give the text itself.")
        return None
    if argument == "-" or not sys.stdin.isatty():
        try:
            piped = sys.stdin.read()
        except UnicodeDecodeError as error:
            raise ConfigError("PROMPT", "must be UTF-8 text on stdin", error.object[:20], f"{error.reason}.") from error
        return piped if piped or argument == "-" else None
    return None


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
    """Use `threads` CPU threads; without a number, one for the embedded target, which is too small to share.

    Raises:
        ConfigError: more than there are CPUs.
    """
    if threads is None and model is None:
        threads = 1
    if threads is not None:
        most = os.cpu_count() or 1
        if threads > most:
            raise ConfigError("--threads", f"must be at most {most} (CPUs of this machine)", threads, "Leave it out.")
        torch.set_num_threads(threads)


def check_seed(seed: int | None) -> None:
    """Raise unless torch and every prompt's own number leave room for the seed.

    Raises:
        ConfigError: it does not fit.
    """
    if seed is not None and not 0 <= seed < MAX_SEED:
        raise ConfigError("--seed", f"must be 0 to {MAX_SEED - 1}", seed, "Usual values are small.")


def load(
    model: str | None,
    dtype: str,
    config: SpecConfig | None,
    where: Where | None = None,
    *,
    attn_implementation: str | None = None,
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """The model, enabled and placed, and its tokenizer.

    Args:
        where: what the options of placement say; else the device list decides, if there is one.

    Raises:
        CheckpointError: the folder is missing or incomplete, or its tokenizer cannot be loaded.
        ConfigError: an unknown precision or device, or an attention that is not installed.
    """
    path = model if model is not None else embedded.path("target")
    if model is None or not sys.stderr.isatty():
        logging.disable_progress_bar()
    arguments = where.target if where is not None and where.target else _listed(config, "target", None)
    try:
        loaded = hf_specdec.AutoModelForCausalLM.from_pretrained(
            path, precision=dtype, attn_implementation=attn_implementation, **arguments
        )
    except ImportError as error:
        if attn_implementation is None or isinstance(error, MissingExtraError):
            raise
        remedy = f"transformers says: {error}"
        raise ConfigError("--attn-implementation", "must be installed", attn_implementation, remedy) from error
    return loaded, load_tokenizer(path)


def load_draft(
    draft_model: str | None,
    dtype: str,
    config: SpecConfig | None,
    device: torch.device | None = None,
    *,
    method: str | None = None,
) -> Any:
    """The draft model, enabled and placed. Without a device list it goes to `device`.

    Without a path it is the embedded one that `method` needs: the head or the draft model. A head stays where it is
    loaded; `generate` puts it beside the target.

    Raises:
        CheckpointError: the folder is missing or incomplete.
        ConfigError: an unknown precision or device.
    """
    own = "head" if method is not None and resolve(method).needs_draft_head else "draft"
    path = draft_model if draft_model is not None else embedded.path(own)
    return loading.load_draft(path, precision=dtype, **_listed(config, "draft", device))


def _listed(config: SpecConfig | None, role: str, device: torch.device | None) -> dict[str, Any]:
    """Arguments of `from_pretrained`: where the configuration's list for a role says, else on `device`."""
    fields, lists = (config.device_fields, config.device_lists) if config is not None else ({}, {})
    if device is not None and lists.get(role) is None:
        return {"device_map": {"": str(device)}}
    device_map, max_memory = place(lists.get(role), fields.get(role, ""))
    return {"device_map": device_map, "max_memory": max_memory}


def encode(tokenizer: PreTrainedTokenizerBase, prompt: str, device: torch.device) -> dict[str, torch.Tensor]:
    """Token ids and mask of one prompt, `(1, length)` each.

    Raises:
        ConfigError: the prompt holds no token, or what is no character.
    """
    if (place := lone_surrogate(prompt)) is not None:
        rule = f"must be Unicode text, but character {place} is half of a pair"
        raise ConfigError("PROMPT", rule, prompt[place], "Is it UTF-8?")
    encoded = tokenizer(prompt, return_tensors="pt")
    if encoded["input_ids"].shape[1] == 0:
        raise ConfigError("PROMPT", "must hold at least one token", prompt, "Type some text to continue.")
    return {name: encoded[name].to(device) for name in ("input_ids", "attention_mask")}
