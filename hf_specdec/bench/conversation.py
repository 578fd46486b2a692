"""From prompts to token ids: chat templates, earlier turns, and what a model has positions for.

encode(subject, messages_of(prompt, answers=["first answer"]), prompt.is_chat)
"""

from collections.abc import Iterable, Sequence

import torch

from hf_specdec.bench.prompts import Prompt
from hf_specdec.bench.subject import Subject
from hf_specdec.errors import ConfigError

__all__ = ["encode", "fitting", "messages_of"]

Messages = list[dict[str, str]]


def messages_of(prompt: Prompt, answers: Iterable[str] = ()) -> Messages:
    """The turns said so far, each answer after its turn, and the turn to be answered now."""
    messages: Messages = []
    for turn, answer in zip(prompt.turns, answers, strict=False):
        messages += [{"role": "user", "content": turn}, {"role": "assistant", "content": answer}]
    return [*messages, {"role": "user", "content": prompt.turns[len(messages) // 2]}]


def encode(subject: Subject, messages: Messages, is_chat: bool) -> dict[str, torch.Tensor]:
    """Token ids and mask, `(1, length)`; through the chat template where prompt and tokenizer are made for it."""
    tokenizer, device = subject.tokenizer, subject.model.device
    if is_chat and getattr(tokenizer, "chat_template", None):
        encoded = tokenizer.apply_chat_template(
            messages, add_generation_prompt=True, return_tensors="pt", return_dict=True
        )
    else:
        encoded = tokenizer("\n\n".join(message["content"] for message in messages), return_tensors="pt")
    return {name: encoded[name].to(device) for name in ("input_ids", "attention_mask")}


def fitting(subject: Subject, prompts: Sequence[Prompt], max_new_tokens: int) -> list[Prompt]:
    """The prompts whose turns and answers the model has positions for.

    Raises:
        ConfigError: there is none.
    """
    positions = getattr(subject.model.config.get_text_config(), "max_position_embeddings", None)
    if positions is None:
        return list(prompts)
    found = []
    for prompt in prompts:
        said = [{"role": "user", "content": "\n\n".join(prompt.turns)}]
        length = encode(subject, said, prompt.is_chat)["input_ids"].shape[1]
        if length + max_new_tokens * len(prompt.turns) <= positions:
            found.append(prompt)
    if not found:
        rule = f"must leave room for the new tokens within the model's {positions} positions"
        raise ConfigError("prompts", rule, len(prompts), "Use shorter prompts or fewer new tokens.")
    return found
