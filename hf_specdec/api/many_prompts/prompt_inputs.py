"""Prompts of `generate_many` in the forms that users have them: text, chats, token ids, inputs of `generate`."""

import difflib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from numbers import Integral
from typing import Any

import torch
from jinja2 import TemplateError
from transformers import PreTrainedModel

from hf_specdec.call.arguments import ASSISTED_ARGUMENTS, DRAFTS, added_arguments
from hf_specdec.call.request import Request
from hf_specdec.common.files import lone_surrogate
from hf_specdec.common.transfer import HOST
from hf_specdec.compat.caches import CACHE_ARGUMENTS
from hf_specdec.compat.generation import accepted_arguments
from hf_specdec.errors import ConfigError

NOT_FOR_ONE = ("streamer", "num_return_sequences")
NOT_FOR_MANY = (*NOT_FOR_ONE, *CACHE_ARGUMENTS)
OF_ONE = ("inputs", "input_ids", "inputs_embeds", "attention_mask", "position_ids")  # inputs of a single prompt
INPUT_NAMES = frozenset({"input_ids", "attention_mask", "token_type_ids"})
NOT_A_PROMPT = "Give a string, chat messages, a list of token ids, a tensor, or a dict with input_ids."


def each_prompt(prompts: Any) -> Iterable[Any]:
    """The prompts one by one.

    Raises:
        ConfigError: one text or one prompt's token ids instead of several prompts, or columns of a table.
    """
    is_table = isinstance(prompts, Mapping) or isinstance(getattr(prompts, "data", None), Mapping)
    is_row = isinstance(prompts, str | bytes) or (isinstance(prompts, torch.Tensor) and prompts.ndim != 2)
    first = prompts[0] if isinstance(prompts, Sequence) and prompts else None
    if is_table or is_row or isinstance(first, int) or _is_message(first) or not isinstance(prompts, Iterable):
        remedy = "Write [prompt] for one text, chat or row of ids; of a table, pass the column of texts."
        raise ConfigError("prompts", "must be several prompts", type(prompts).__name__, remedy)
    return prompts


def check_all(request: Request, tokenizer: Any) -> None:
    """Refuse a tokenizer that is none, and settings that cannot be the same for all prompts of a job."""
    if tokenizer is not None and (isinstance(tokenizer, bytes) or not callable(getattr(tokenizer, "decode", None))):
        raise ConfigError("tokenizer", "must be a tokenizer", tokenizer, "Load it with AutoTokenizer.from_pretrained.")
    for name in (*NOT_FOR_MANY, *OF_ONE):
        value = request.setting(name)
        if value is None or (name == "num_return_sequences" and value == 1):
            continue
        remedy = "Put it among the prompts, each a dict." if name in OF_ONE else "Use generate for it."
        raise ConfigError(name, "must be unset for many prompts", type(value).__name__, remedy)


def checked_seed(seed: Any) -> int | None:
    """A seed as torch takes it, or `None`.

    Raises:
        ConfigError: it is no whole number of 64 bits.
    """
    if seed is None:
        return None
    if isinstance(seed, Integral) and not isinstance(seed, bool) and -(1 << 63) <= int(seed) < 1 << 63:
        return int(seed)
    raise ConfigError("seed", "must be a whole number of 64 bits", seed, "Usual values are small.")


def numbered(prompts: Iterable[Any], indices: Iterable[int] | None) -> Iterator[tuple[int, Any]]:
    """Every prompt with its number.

    Raises:
        ConfigError: there are fewer numbers than prompts, one is given twice, or is none.
    """
    if indices is None:
        yield from enumerate(prompts)
        return
    numbers, seen = iter(indices), set[int]()
    for prompt in prompts:
        number = next(numbers, None)
        if not isinstance(number, Integral) or number in seen:
            rule = "must hold a whole number for every prompt, and none twice"
            raise ConfigError("indices", rule, number, "Number the prompts differently.")
        seen.add(number)
        yield int(number), prompt


def inputs_of(prompt: Any, tokenizer: Any) -> dict[str, Any]:
    """`generate`'s inputs and settings for one prompt; ids and mask of a mapping as `(1, length)` tensors.

    Raises:
        ConfigError: it is in none of the forms, or needs a tokenizer that is not there.
    """
    if isinstance(prompt, str):
        if tokenizer is None:
            raise ConfigError("tokenizer", "must be given for prompts that are text", None, "Pass tokenizer=...")
        if (place := lone_surrogate(prompt)) is not None:
            rule, value = "must be Unicode text, without lone surrogates", f"{prompt[place]!a} at character {place}"
            raise ConfigError("prompt", rule, value, "Decode the text's bytes as UTF-8.")
        return _encoded(tokenizer(prompt, return_tensors="pt"))
    if isinstance(prompt, Mapping):
        if not prompt.keys() & {"input_ids", "inputs", "inputs_embeds"}:
            raise ConfigError(
                "prompt", "must hold input_ids where it is a dict", sorted(map(str, prompt)), NOT_A_PROMPT
            )
        tensors = {name: _as_ids(prompt[name], prompt) for name in INPUT_NAMES if prompt.get(name) is not None}
        return {**prompt, **{name: ids[None] if ids.ndim == 1 else ids for name, ids in tensors.items()}}
    if isinstance(prompt, Sequence) and prompt and all(map(_is_message, prompt)):
        if getattr(tokenizer, "chat_template", None) is None:
            rule, remedy = "must be text or ids, as the tokenizer has no chat template", "Pass that of a chat model."
            raise ConfigError("prompt", rule, prompt, remedy)
        chat = tokenizer.apply_chat_template(
            list(prompt), add_generation_prompt=True, return_dict=True, return_tensors="pt"
        )
        return _encoded(chat)
    return {"input_ids": _as_ids(prompt, prompt)}


def _as_ids(ids: Any, prompt: Any) -> torch.Tensor:
    """Converts a prompt of numbers to a tensor."""
    try:
        return _tensor(ids)
    except (TypeError, ValueError, RuntimeError) as error:
        raise ConfigError("prompt", "must hold the token ids of one sequence", prompt, NOT_A_PROMPT) from error


def check_one(inputs: dict[str, Any], prompt: Any) -> None:
    """Make `input_ids` `(1, length)`, and a seed a number of Python's.

    Raises:
        ConfigError: they are of no sequence or of several, or a setting is for `generate` alone.
    """
    ids = inputs.get("input_ids")
    if isinstance(ids, torch.Tensor):
        ids = inputs["input_ids"] = ids[None] if ids.ndim == 1 else ids
    is_whole = isinstance(ids, torch.Tensor) and ids.dtype != torch.bool and not ids.is_floating_point()
    if not isinstance(ids, torch.Tensor) or ids.ndim != 2 or len(ids) != 1 or not is_whole:
        rule = "must hold the token ids of one sequence"
        raise ConfigError("prompt", rule, prompt, "Give a string, a list of token ids or a tensor.")
    for name in NOT_FOR_ONE:
        if inputs.get(name) not in (None, 1):
            raise ConfigError("prompt", f"must not set {name}", inputs[name], "Use generate for it.")
    for name in inputs.keys() & {*added_arguments(), *DRAFTS, *ASSISTED_ARGUMENTS}:
        rule = f"must not set {name}, which is the same for all prompts"
        raise ConfigError("prompt", rule, inputs[name], "Pass it to generate_many.")
    inputs["seed"] = checked_seed(inputs.get("seed"))
    if not isinstance(salt := inputs.get("cache_salt"), str | None):
        raise ConfigError("cache_salt", "must be a string", salt, "Leave it out to share all texts.")


def chat_text(tokenizer: Any, messages: Sequence[Mapping[str, Any]], /, **options: Any) -> str:
    """A chat as the tokenizer's template writes it, up to where the model answers.

    Args:
        options: of `apply_chat_template`, such as `tools`.

    Raises:
        ConfigError: the template refuses the messages, or is none.
    """
    try:
        return str(tokenizer.apply_chat_template(list(messages), tokenize=False, add_generation_prompt=True, **options))
    except (TemplateError, TypeError) as error:  # TypeError: of operations in it, and of options that it sets itself
        roles = ", ".join(str(message.get("role")) for message in messages)
        rule = "must be messages that the chat template takes"
        raise ConfigError("messages", rule, roles, f"The template says: {error}") from error


def check_names(model: PreTrainedModel, kwargs: Mapping[str, Any], also: Iterable[str] = ()) -> None:
    """Raise where `generate` has no argument or setting of a name.

    Args:
        also: names that the error may propose besides those of `generate`.

    Raises:
        ConfigError: names the field, and the nearest one that there is.
    """
    settings = accepted_arguments(model) | set(added_arguments())
    for name, value in kwargs.items():
        if name not in settings:
            close = difflib.get_close_matches(str(name), [*settings, *also], n=1)
            remedy = f"Did you mean {close[0]!r}?" if close else "See the arguments of generate."
            raise ConfigError(str(name), "must be an argument or a setting of generate", value, remedy)


def _tensor(ids: Any) -> torch.Tensor:
    """Numbers as a tensor on the host; a tensor stays where it is."""
    return ids if isinstance(ids, torch.Tensor) else torch.as_tensor(ids, device=HOST)


def _encoded(encoded: Mapping[str, Any]) -> dict[str, Any]:
    return {name: encoded[name] for name in ("input_ids", "attention_mask") if name in encoded}


def _is_message(value: Any) -> bool:
    return isinstance(value, Mapping) and "role" in value
