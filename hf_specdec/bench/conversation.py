"""From prompts to token ids: chat templates, earlier turns, random tokens, and what a model has positions for."""

import dataclasses
from collections.abc import Iterable, Sequence

import torch

from hf_specdec.bench.prompts import Prompt
from hf_specdec.bench.subject import Subject
from hf_specdec.errors import ConfigError

__all__ = ["encode", "fitting"]

Messages = list[dict[str, str]]


def encode(subject: Subject, prompt: Prompt, answers: Iterable[str] = ()) -> dict[str, torch.Tensor]:
    """Token ids and mask, `(1, length)`, of what has been said after as many turns as there are `answers`."""
    if prompt.num_random_tokens:
        ids = _random_ids(subject, prompt)
        return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    return _encode(subject, _messages_of(prompt, answers), prompt.is_chat)


def _random_ids(subject: Subject, prompt: Prompt) -> torch.Tensor:
    """`(1, num_random_tokens)` ids that tokenizer and model know, special ones left out, drawn on the CPU."""
    special = set(subject.tokenizer.all_special_ids)
    vocab_size = min(len(subject.tokenizer), subject.model.config.get_text_config().vocab_size)
    known = torch.tensor([token for token in range(vocab_size) if token not in special])
    generator = torch.Generator().manual_seed(prompt.seed)
    picks = torch.randint(len(known), (1, prompt.num_random_tokens), generator=generator)
    return known[picks].to(subject.model.device)


def _messages_of(prompt: Prompt, answers: Iterable[str] = ()) -> Messages:
    """The turns said so far, each answer after its turn, and the turn to be answered now."""
    messages: Messages = []
    for turn, answer in zip(prompt.turns, answers, strict=False):
        messages += [{"role": "user", "content": turn}, {"role": "assistant", "content": answer}]
    return [*messages, {"role": "user", "content": prompt.turns[len(messages) // 2]}]


def _encode(subject: Subject, messages: Messages, is_chat: bool) -> dict[str, torch.Tensor]:
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
        whole = dataclasses.replace(prompt, turns=("\n\n".join(prompt.turns),))
        length = encode(subject, whole)["input_ids"].shape[1]
        if length + max_new_tokens * len(prompt.turns) <= positions:
            found.append(prompt)
    if not found:
        rule = f"must leave room for the new tokens within the model's {positions} positions"
        raise ConfigError("prompts", rule, len(prompts), "Use shorter prompts or fewer new tokens.")
    return found
