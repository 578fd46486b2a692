"""Chats go through the target's template, the target answers every turn, and its answers are learned from."""

import logging
from pathlib import Path
from typing import Any

import pytest
from transformers import LlamaForCausalLM

from hf_specdec import ConfigError
from hf_specdec.tools.train import HeadTraining, train_draft
from hf_specdec.tools.train.chats import Chats
from hf_specdec.tools.train.texts import read_shard
from tests.training.conftest import SETTINGS, WordNumbers

CONFIG = HeadTraining(**{**SETTINGS, "prompt_tokens": None, "epochs": 0.2, "new_tokens": 6})
USER, ASSISTANT = 38, 39  # tokens of the template
CHATS = [[{"role": "user", "content": " ".join(map(str, range(2, 3 + n)))}] for n in range(30)]


class ChatNumbers(WordNumbers):
    """Words are token ids; every message begins with its role's."""

    chat_template = "a template"

    def apply_chat_template(self, messages: Any, *, tokenize: bool, add_generation_prompt: bool) -> str:
        assert not tokenize and add_generation_prompt
        roles = {"user": USER, "assistant": ASSISTANT}
        said = [f"{roles[message['role']]} {message['content']}" for message in messages]
        return " ".join([*said, str(ASSISTANT)])

    def decode(self, ids: list[int], **_: Any) -> str:
        return " ".join(map(str, ids))


def test_a_head_learns_from_the_target_s_answers_to_chats(
    target: LlamaForCausalLM, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    tokenizer: Any = ChatNumbers()
    with caplog.at_level(logging.INFO, "hf_specdec"):
        report = train_draft(target, tokenizer, CHATS, tmp_path, CONFIG)
    assert report.measured
    assert "writing 40 more texts takes about" in caplog.text
    assert caplog.text.index("writing") < caplog.text.index("held-out")
    asked = [set(), set()]
    for index in range(CONFIG.num_shards):
        shard = read_shard(tmp_path / "work", index)
        for ids, real in zip(shard.ids[:, : shard.num_prompt_tokens], shard.real, strict=True):
            prompt = ids[real[: shard.num_prompt_tokens]].tolist()
            assert prompt[0] == USER
            assert prompt[-1] == ASSISTANT
            asked[index >= CONFIG.num_held_out_shards].add(tuple(prompt))
    assert not asked[0] & asked[1], "a chat that is held out is learned from"


def test_the_target_answers_every_turn(target: LlamaForCausalLM) -> None:
    chat = [{"role": "user", "content": "3 4"}, {"role": "user", "content": "5"}]
    chats = Chats([chat], ChatNumbers(), CONFIG, None)
    asked: list[list[list[int]]] = []

    def answers(prompts: list[list[int]]) -> list[list[int]]:
        asked.append(prompts)
        return [[7, 8]] * len(prompts)

    found = chats.prompts_of(0, answers)
    assert asked == [[[USER, 3, 4, ASSISTANT]] * CONFIG.texts_per_shard]
    assert found == [[USER, 3, 4, ASSISTANT, 7, 8, USER, 5, ASSISTANT]] * CONFIG.texts_per_shard


def test_answers_that_end_a_chat_are_left_out() -> None:
    chat = [{"role": "user", "content": "3"}, {"role": "assistant", "content": "9"}]
    chats = Chats([chat], ChatNumbers(), CONFIG, None)
    assert chats.prompts_of(0, lambda _: [])[0] == [USER, 3, ASSISTANT]


def test_longer_chats_are_left_out_and_never_cut(target: LlamaForCausalLM, tmp_path: Path) -> None:
    long = [{"role": "user", "content": "3 " * 600}]
    assert Chats([*CHATS, long], ChatNumbers(), CONFIG, None).num_used == len(CHATS)
    with pytest.raises(ConfigError, match="must have at most 512 tokens"):
        Chats([long], ChatNumbers(), CONFIG, None)
    with pytest.raises(ConfigError, match="must have at most 10 tokens"):
        Chats([long], ChatNumbers(), CONFIG, 16)


def test_a_tokenizer_without_a_template_is_told(target: LlamaForCausalLM, tmp_path: Path) -> None:
    tokenizer: Any = WordNumbers()
    with pytest.raises(ConfigError, match="`tokenizer` must have a chat template"):
        train_draft(target, tokenizer, CHATS, tmp_path, CONFIG)


@pytest.mark.parametrize("prompts", [[*CHATS[:1], "3 4"], [[]], [[{"role": "user"}]]], ids=str)
def test_prompts_are_texts_or_chats(target: LlamaForCausalLM, tmp_path: Path, prompts: Any) -> None:
    tokenizer: Any = ChatNumbers()
    with pytest.raises(ConfigError, match="must be a list of texts, or of chats"):
        train_draft(target, tokenizer, prompts, tmp_path, CONFIG)
