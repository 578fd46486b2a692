"""From what the user typed to a prompt and models. Knows nothing about output."""

import os
import sys
from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from hf_specdec.api.many_prompts.prompt_inputs import chat_text
from hf_specdec.common.files import lone_surrogate
from hf_specdec.compat.attention import attention_function_of
from hf_specdec.errors import ConfigError, unknown_name
from hf_specdec.kernels.quantization.precision import PRECISIONS
from hf_specdec.loading import auto as loading
from hf_specdec.loading import embedded
from hf_specdec.loading.published import folder_of
from hf_specdec.methods.common.config import SpecConfig
from hf_specdec.methods.registry import resolve
from hf_specdec.tools.cli.where import placement

ATTENTIONS = (
    "eager",
    "flash_attention_2",
    "flash_attention_3",
    "flash_attention_4",
    "flex_attention",
    "sdpa",
    "xformers",
)
MAX_SEED = 1 << 62


def read_prompt(argument: str | None) -> str | None:
    """The prompt from the argument or stdin; `None` where neither says anything."""
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


def set_threads(model: str | None, threads: int | None) -> None:
    """Use `threads` CPU threads; without a number, one for the embedded target, which is too small to share."""
    if threads is None and model is None:
        threads = 1
    if threads is not None:
        most = os.cpu_count() or 1
        if threads > most:
            raise ConfigError("--threads", f"must be at most {most} (CPUs of this machine)", threads, "Leave it out.")
        torch.set_num_threads(threads)


def check_precision(option: str, name: str) -> None:
    """Raise unless weights can be loaded in the precision that an option names."""
    if name not in PRECISIONS:
        raise unknown_name(option, name, PRECISIONS)


def check_attention(name: str | None) -> None:
    """Raise unless `--attn-implementation` names an attention that transformers or this package has, or a kernel's
    repository on the hub.
    """
    if name is not None and name not in ATTENTIONS and "/" not in name and attention_function_of(name) is None:
        raise unknown_name("--attn-implementation", name, ATTENTIONS)


def check_seed(seed: int | None) -> None:
    """Raise unless torch and every prompt's own number leave room for the seed."""
    if seed is not None and not 0 <= seed < MAX_SEED:
        raise ConfigError("--seed", f"must be 0 to {MAX_SEED - 1}", seed, "Usual values are small.")


def check_chat(tokenizer: PreTrainedTokenizerBase) -> None:
    """Raise where a chat is asked for and the tokenizer has no chat template."""
    if getattr(tokenizer, "chat_template", None) is None:
        remedy = "Leave --chat out to continue text, or name a chat model, such as smollm2."
        raise ConfigError("--chat", "must come with a model that has a chat template", tokenizer.name_or_path, remedy)


def chat_of(prompt: str, system: str | None) -> list[dict[str, str]]:
    """Messages of a chat that begins with `prompt`."""
    told = [] if system is None else [{"role": "system", "content": system}]
    return [*told, {"role": "user", "content": prompt}]


def load_draft(
    draft_model: str | None,
    dtype: str,
    config: SpecConfig | None,
    device: torch.device | None = None,
    *,
    method: str | None = None,
    target: PreTrainedModel | None = None,
) -> Any:
    """The draft model, enabled and placed. Without a device list it goes to `device`.

    Without a path it is the embedded one that `method` needs: the head or the draft model. A head stays where it is
    loaded; `generate` puts it next to the target.
    """
    own = "head" if method is not None and resolve(method).needs_draft_head else "draft"
    path = folder_of(draft_model) if draft_model is not None else embedded.path(own)
    return loading.load_draft(path, precision=dtype, target=target, **placement(config, "draft", device))


def encode(
    tokenizer: PreTrainedTokenizerBase, prompt: str, device: torch.device, system: str | None = None, *, is_chat: bool
) -> dict[str, torch.Tensor]:
    """Token ids and mask of one prompt, `(1, length)` each.

    Args:
        system: what a chat's model is told first.
        is_chat: whether the prompt goes through the tokenizer's chat template, as a user's message.
    """
    for option, text in {"PROMPT": prompt, "--system": system or ""}.items():
        if (place := lone_surrogate(text)) is not None:
            rule = "must be Unicode text, without bytes that are no UTF-8"
            raise ConfigError(option, rule, f"{text[place]!a} at character {place}", "Convert it to UTF-8.")
    if is_chat:
        prompt = chat_text(tokenizer, chat_of(prompt, system))
    encoded = tokenizer(prompt, add_special_tokens=not is_chat, return_tensors="pt")
    if encoded["input_ids"].shape[1] == 0:
        raise ConfigError("PROMPT", "must hold at least one token", prompt, "Type some text to continue.")
    return {name: encoded[name].to(device) for name in ("input_ids", "attention_mask")}
