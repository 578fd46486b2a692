"""Arguments of a training, checked before the target writes anything."""

import os
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

from transformers import PreTrainedModel

from hf_specdec import compat
from hf_specdec.common.files import check_path
from hf_specdec.errors import ConfigError
from hf_specdec.tools.train.config import Training

AnyTraining = TypeVar("AnyTraining", bound=Training)
Prompt = str | Sequence[Mapping[str, Any]]  # a text, or the messages of a chat


def checked_config(
    config_class: type[AnyTraining],
    target: PreTrainedModel,
    tokenizer: Any,
    prompts: Sequence[Prompt] | None,
    out: str | os.PathLike[str],
    config: AnyTraining | None,
) -> AnyTraining:
    """The settings, by default those of `config_class`, next to arguments of the right types.

    Raises:
        ConfigError: names the argument that is not.
    """
    if not isinstance(compat.generation_model(target), PreTrainedModel):
        remedy = "Load it with hf_specdec.AutoModelForCausalLM."
        raise ConfigError("target", "must be a transformers model", type(target).__name__, remedy)
    if prompts is not None and not callable(tokenizer):
        remedy = "Load it with transformers.AutoTokenizer."
        raise ConfigError("tokenizer", "must be a tokenizer, which encodes the prompts", tokenizer, remedy)
    is_listed = prompts is None or (isinstance(prompts, Sequence) and not isinstance(prompts, str | bytes))
    listed = list(prompts or ()) if is_listed else [None]
    if not all(isinstance(prompt, str) for prompt in listed) and not (listed and all(map(_is_chat, listed))):
        remedy = "Write [text] or [messages], also for one; None lets the target write from its first token."
        raise ConfigError("prompts", "must be a list of texts, or of chats", prompts, remedy)
    check_path("out", out, "a folder to write")
    if config is None:
        return config_class()
    if not isinstance(config, config_class):
        remedy = f"Write {config_class.__name__}(...) of hf_specdec.tools.train, or leave it out."
        raise ConfigError("config", f"must be a {config_class.__name__}", config, remedy)
    return config


def _is_chat(prompt: Any) -> bool:
    """True for a list of messages with a role and a text each."""
    if isinstance(prompt, str | bytes) or not isinstance(prompt, Sequence) or not prompt:
        return False
    texts = [message.get(key) for message in prompt if isinstance(message, Mapping) for key in ("role", "content")]
    return len(texts) == 2 * len(prompt) and all(isinstance(text, str) for text in texts)


def check_given_head(head: Any, head_class: type, kind: str, config: Training, *, of_shape: Sequence[str]) -> None:
    """Check a head that is trained on, if one is given.

    Args:
        kind: what it has to be, for the error.
        of_shape: settings of a new head's shape, which is that of the given one.

    Raises:
        ConfigError: it is none of `head_class`, or a setting would change its shape.
    """
    if head is None:
        return
    if not isinstance(head, head_class):
        remedy = "Load it with hf_specdec.AutoDraftHead, or leave it out for a new one."
        raise ConfigError("head", f"must be {kind}", type(head).__name__, remedy)
    for name in of_shape:
        value = getattr(config, name)
        if value is not None:
            raise ConfigError(name, "must be None where a head is trained on", value, "A new head can have any shape.")
