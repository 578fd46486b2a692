"""From prompts to token ids: chat templates, earlier turns, random tokens, batches, and what has positions."""

import dataclasses
from collections.abc import Iterable, Sequence

import torch

from hf_specdec.common.transfer import left_padded
from hf_specdec.compat import max_positions
from hf_specdec.errors import ConfigError
from hf_specdec.tools.bench.loaded_model import LoadedModel
from hf_specdec.tools.bench.prompts import Prompt
from hf_specdec.tools.prompt_lines import Message

MOST_OF_A_BATCH = 256  # tokens of a prompt, so that padding does not decide
MOST_NAMED = 3  # prompts that are too long

Messages = list[Message]


def encode(loaded: LoadedModel, prompt: Prompt, answers: Iterable[str] = ()) -> dict[str, torch.Tensor]:
    """Token ids and mask, `(1, length)`, of what has been said after as many turns as there are `answers`.

    Of a batch `(rows, length)`: its prompts, cut to their last tokens and padded on the left.

    Raises:
        ConfigError: the tokenizer leaves nothing of a prompt.
    """
    if prompt.batch:
        rows = [encode(loaded, part)["input_ids"][0].tolist() for part in prompt.batch]
        return padded(loaded, [row[-MOST_OF_A_BATCH:] for row in rows])
    if prompt.num_random_tokens:
        ids = _random_ids(loaded, prompt)
        return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    return _encode(loaded, _messages_of(prompt, answers), prompt.is_chat)


def padded(loaded: LoadedModel, rows: Sequence[Sequence[int]]) -> dict[str, torch.Tensor]:
    """Token ids and mask, `(rows, length)`, padded on the left."""
    ids, mask = left_padded(rows, loaded.device)
    return {"input_ids": ids, "attention_mask": mask}


def _random_ids(loaded: LoadedModel, prompt: Prompt) -> torch.Tensor:
    """`(1, num_random_tokens)` ids that tokenizer and model know, special ones left out, drawn on the CPU."""
    special = set(loaded.tokenizer.all_special_ids)
    vocab_size = min(len(loaded.tokenizer), loaded.model.config.get_text_config().vocab_size)
    known = torch.tensor([token for token in range(vocab_size) if token not in special])
    generator = torch.Generator().manual_seed(prompt.seed)
    picks = torch.randint(len(known), (1, prompt.num_random_tokens), generator=generator)
    return known[picks].to(loaded.device)


def _messages_of(prompt: Prompt, answers: Iterable[str] = ()) -> Messages:
    """The chat so far: what came before, the turns, each answer after its turn, and the turn to be answered now."""
    messages: Messages = []
    for turn, answer in zip(prompt.turns, answers, strict=False):
        messages += [{"role": "user", "content": turn}, {"role": "assistant", "content": answer}]
    return [*prompt.before, *messages, {"role": "user", "content": prompt.turns[len(messages) // 2]}]


def _encode(loaded: LoadedModel, messages: Messages, is_chat: bool) -> dict[str, torch.Tensor]:
    """Token ids and mask, `(1, length)`; through the chat template where prompt and tokenizer are made for it."""
    tokenizer, device = loaded.tokenizer, loaded.device
    if is_chat and getattr(tokenizer, "chat_template", None):
        encoded = tokenizer.apply_chat_template(
            messages, add_generation_prompt=True, return_tensors="pt", return_dict=True
        )
    else:
        encoded = tokenizer("\n\n".join(message["content"] for message in messages), return_tensors="pt")
    if encoded["input_ids"].shape[1] == 0:
        text = messages[-1]["content"]
        raise ConfigError("prompts", "must have a token each", text[:80], "Leave this one out: the tokenizer drops it.")
    return {name: encoded[name].to(device) for name in ("input_ids", "attention_mask")}


def fitting(loaded: LoadedModel, prompts: Sequence[Prompt], max_new_tokens: int) -> tuple[list[Prompt], str]:
    """The prompts whose turns and answers the model has positions for.

    Returns:
        Them, and the others by name and length.

    Raises:
        ConfigError: none fits.
    """
    positions = max_positions(loaded.model.config)
    if positions is None:
        return list(prompts), ""
    fit, too_long = [], []
    for prompt in prompts:
        whole = dataclasses.replace(prompt, turns=("\n\n".join(prompt.turns),))
        length, num_turns = encode(loaded, whole)["input_ids"].shape[1], len(prompt.turns)
        if length + max_new_tokens * num_turns <= positions:
            fit.append(prompt)
        else:
            too_long.append(f"{prompt.id} ({length} tokens{f' in {num_turns} turns' if num_turns > 1 else ''})")
    if not fit:
        rule = f"must leave room for {max_new_tokens} new tokens a turn within the model's {positions} positions"
        remedy = "Leave these out and name shorter prompts, or take a lower --max-new-tokens."
        raise ConfigError("prompts", rule, _listed(too_long), remedy)
    return fit, _listed(too_long)


def _listed(names: Sequence[str]) -> str:
    """The first names, and how many more there are."""
    more = len(names) - MOST_NAMED
    return ", ".join(names[:MOST_NAMED]) + (f" and {more} more" if more > 0 else "")
