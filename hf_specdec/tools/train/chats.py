"""Chats as prompts: through the target's chat template up to its answer, earlier answers written by the target too."""

import random
from collections.abc import Callable, Mapping, Sequence
from itertools import cycle, islice
from typing import Any

from hf_specdec.api.many_prompts.prompt_inputs import chat_text
from hf_specdec.errors import ConfigError
from hf_specdec.tools.train.config import Training

Messages = list[Mapping[str, Any]]
Answers = Callable[[list[list[int]]], list[list[int]]]
LONGEST = 512  # tokens of a chat, where `prompt_tokens` is not given


class Chats:
    """Chats in the order in which the target answers them.

    A shard holds chats of about one length, since shorter ones are padded. Chats that are held out are in no other
    shard.

    Args:
        chats: messages of each; between two user messages in a row the target answers.
        tokenizer: the target's, with a chat template.
        config: the settings; `prompt_tokens` is the length up to which chats are used.
        positions: those of the target, if it has a bound.

    Raises:
        ConfigError: the tokenizer has no chat template, it refuses a chat, or all chats are too long.
    """

    def __init__(self, chats: Sequence[Messages], tokenizer: Any, config: Training, positions: int | None) -> None:
        if getattr(tokenizer, "chat_template", None) is None:
            rule, remedy = "must have a chat template for prompts that are chats", "Use the tokenizer of a chat model."
            raise ConfigError("tokenizer", rule, getattr(tokenizer, "name_or_path", None), remedy)
        self.tokenizer, self.config = tokenizer, config
        self.longest = LONGEST if config.prompt_tokens is None else max(config.prompt_lengths)
        if positions is not None:
            self.longest = min(self.longest, positions - config.new_tokens)
        lengths = {}
        for place in range(len(chats)):
            chat = _without_last_answers(chats[place])
            length = len(self.ids_of(chat)) + config.new_tokens * sum(map(_is_open, chat, chat[1:]))
            if chat and length <= self.longest:
                lengths[place] = length
        if not lengths:
            rule = f"must have at most {self.longest} tokens with the answers before the last"
            raise ConfigError("prompts", rule, f"{len(chats)} longer chats", "Give shorter chats, or --prompt-tokens.")
        self.num_used = len(lengths)
        self.shards = [[_without_last_answers(chats[i]) for i in shard] for shard in _in_shards(lengths, config)]

    def ids_of(self, chat: Messages) -> list[int]:
        """Token ids of a chat as the template writes it, up to the answer."""
        text = chat_text(self.tokenizer, chat)
        return list(self.tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])

    def prompts_of(self, index: int, answers: Answers) -> list[list[int]]:
        """Token ids of the chats of shard `index`.

        Args:
            answers: gives the tokens that the target writes after each of some prompts.
        """
        chats = [list(chat) for chat in self.shards[index]]
        while True:
            places = {
                row: place
                for row, chat in enumerate(chats)
                if (place := next((i for i in range(1, len(chat)) if _is_open(chat[i - 1], chat[i])), None))
            }
            if not places:
                return [self.ids_of(chat) for chat in chats]
            said = answers([self.ids_of(chats[row][:place]) for row, place in places.items()])
            for (row, place), ids in zip(places.items(), said, strict=True):
                text = self.tokenizer.decode(ids, skip_special_tokens=True).strip()
                chats[row].insert(place, {"role": "assistant", "content": text})


def _in_shards(lengths: Mapping[int, int], config: Training) -> list[list[int]]:
    """Numbers of the chats in each shard, the held-out shards first.

    Args:
        lengths: tokens of each chat, by its number.
    """
    generator = random.Random(config.seed)
    order = generator.sample(list(lengths), len(lengths))
    share = config.num_held_out_shards / config.num_shards
    held_out = order[: max(1, round(share * len(order)))]
    learned = order[len(held_out) :] or held_out
    found = []
    for chosen, num_shards in (
        (held_out, config.num_held_out_shards),
        (learned, config.num_shards - config.num_held_out_shards),
    ):
        wanted = num_shards * config.texts_per_shard
        chosen = generator.sample(chosen, min(wanted, len(chosen)))
        chosen.sort(key=lambda number: lengths[number])
        in_order = list(islice(cycle(chosen), wanted))
        shards = [in_order[i : i + config.texts_per_shard] for i in range(0, wanted, config.texts_per_shard)]
        found += generator.sample(shards, len(shards))
    return found


def _is_open(message: Mapping[str, Any], following: Mapping[str, Any]) -> bool:
    """True where the target has to answer before the next message."""
    return bool(message["role"] == following["role"] == "user")


def _without_last_answers(chat: Messages) -> Messages:
    """The chat up to what the target answers."""
    chat = list(chat)
    while chat and chat[-1]["role"] == "assistant":
        chat.pop()
    return chat
