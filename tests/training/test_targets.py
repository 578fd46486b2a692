"""Targets of many shapes and with settings of their own: a head of their size, or an error before a text is written."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as tf
from accelerate import Accelerator
from transformers import LlamaForCausalLM

from hf_specdec.errors import CheckpointError, ConfigError, UnsupportedModelError
from hf_specdec.tools.train import (
    DFlashTraining,
    DraftTraining,
    HeadTraining,
    train_draft,
)
from hf_specdec.tools.train.batch import draft_ids
from hf_specdec.tools.train.rollout import HeadRollout
from hf_specdec.tools.train.texts import read_shard, shard_path
from tests.helpers.heads import random_head
from tests.helpers.zoo import FAMILIES, build
from tests.training.conftest import PROMPTS, SETTINGS, WordNumbers

# One shard is learned from and one held out; two steps.
SHORT: dict[str, Any] = {**SETTINGS, "num_texts": 16, "epochs": 1.0, "new_tokens": 8}
CONFIGS: dict[str, Any] = {"head": HeadTraining, "dflash": DFlashTraining, "draft": DraftTraining}
KINDS = list(CONFIGS)
HEADS = ["head", "dflash"]
SIZES = {"vocab_size": 128, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}


def train(kind: str, target: Any, folder: Path, tokenizer: Any = None, **fields: Any) -> Any:
    return train_draft(target, tokenizer or WordNumbers(), PROMPTS, folder, CONFIGS[kind](**SHORT | fields))


def nothing_written(folder: Path) -> bool:
    return not list(folder.glob("work/shard-*"))


@pytest.mark.parametrize("kind", HEADS)
@pytest.mark.parametrize("family", ["gpt2", "bloom", "gemma3", "qwen3"])
def test_heads_have_the_shape_of_their_target(kind: str, family: str, tmp_path: Path) -> None:
    target = build(FAMILIES[family])
    train(kind, target, tmp_path)
    config = tf.AutoConfig.from_pretrained(tmp_path) if kind == "dflash" else None
    heads = target.config.num_attention_heads
    if config is not None:
        assert (config.num_attention_heads, config.hidden_size) == (heads, target.config.hidden_size)
        head_dim = getattr(target.config, "head_dim", None) or target.config.hidden_size // heads
        assert config.head_dim == head_dim
        assert config.num_key_value_heads == (getattr(target.config, "num_key_value_heads", None) or heads)


def test_heads_are_as_wide_as_those_of_a_target_that_names_no_width(tmp_path: Path) -> None:
    """Qwen2's configuration has no head_dim, and Qwen3's default is 128."""
    target = tf.Qwen2ForCausalLM(tf.Qwen2Config(**SIZES, num_key_value_heads=2, intermediate_size=64))
    target.generation_config.eos_token_id = None
    train("dflash", target.eval(), tmp_path)
    assert tf.AutoConfig.from_pretrained(tmp_path).head_dim == 16


@pytest.mark.parametrize("kind", HEADS)
def test_embeddings_of_another_width_are_refused_before_a_text_is_written(kind: str, tmp_path: Path) -> None:
    options = {**FAMILIES["opt"].options, "word_embed_proj_dim": 32}
    target = tf.OPTForCausalLM(tf.OPTConfig(**options))
    with pytest.raises(UnsupportedModelError, match="OPTForCausalLM have 32 columns"):
        train(kind, target, tmp_path)
    assert nothing_written(tmp_path)


@pytest.mark.parametrize("kind", KINDS)
def test_texts_longer_than_the_positions_are_refused(kind: str, tmp_path: Path) -> None:
    target = tf.GPT2LMHeadModel(tf.GPT2Config(n_embd=32, n_head=2, n_layer=2, n_positions=16, vocab_size=64))
    with pytest.raises(ConfigError, match="`new_tokens` must fit the target's 16 positions next to prompt_tokens 4"):
        train(kind, target, tmp_path, new_tokens=13)
    assert nothing_written(tmp_path)


@pytest.mark.parametrize("kind", KINDS)
def test_a_target_s_own_generation_settings(kind: str, target: LlamaForCausalLM, tmp_path: Path) -> None:
    """One text for a prompt, and padding that its embeddings have."""
    target = copy.deepcopy(target)
    settings = {"num_return_sequences": 2, "num_beams": 2, "return_dict_in_generate": True}
    for name, value in settings.items():
        setattr(target.generation_config, name, value)
    if kind != "draft":
        target.generation_config.pad_token_id = -1
    prompts = [*PROMPTS[:6], "3", "4 5"]
    train_draft(target, WordNumbers(), prompts, tmp_path, CONFIGS[kind](**SHORT))
    assert read_shard(tmp_path / "work", 0).ids.shape == (SHORT["texts_per_shard"], 4 + 8)


def test_settings_that_a_draft_could_not_be_saved_with(target: LlamaForCausalLM, tmp_path: Path) -> None:
    target = copy.deepcopy(target)
    target.generation_config.pad_token_id = -1
    with pytest.raises(ConfigError, match="`generation_config` must be one that transformers saves, .*pad_token"):
        train("draft", target, tmp_path)
    assert nothing_written(tmp_path)


def test_a_mask_token_that_the_target_has_no_embedding_for(target: LlamaForCausalLM, tmp_path: Path) -> None:
    tokenizer = WordNumbers()
    tokenizer.mask_token_id = 40  # type: ignore[attr-defined]
    train("dflash", target, tmp_path, tokenizer)
    assert tf.AutoConfig.from_pretrained(tmp_path).dflash_config["mask_token_id"] == 0


def test_work_of_another_tokenizer_is_not_gone_on_with(target: LlamaForCausalLM, tmp_path: Path) -> None:
    class Others(WordNumbers):
        def __call__(self, text: str, **_: Any) -> dict[str, list[int]]:
            return {"input_ids": [39 - int(word) for word in text.split()]}

    train("head", target, tmp_path)
    with pytest.raises(ConfigError, match="`prompts` must be '32 pieces, of digest"):
        train("head", target, tmp_path, Others())


def test_a_precision_that_accelerate_was_not_set_up_for(target: LlamaForCausalLM, tmp_path: Path) -> None:
    Accelerator(cpu=True)
    with pytest.raises(ConfigError, match="`mixed_precision` must stay as accelerate has been set up"):
        train("head", target, tmp_path, mixed_precision="bf16")


def test_a_state_that_is_none_is_named(target: LlamaForCausalLM, tmp_path: Path) -> None:
    train("head", target, tmp_path)
    torch.save({"x": 1}, tmp_path / "work" / "state.pt")
    with pytest.raises(CheckpointError, match=r"state\.pt' is no state of a training\. Delete it"):
        train("head", target, tmp_path)


def test_labels_are_those_of_the_tokens_that_the_head_drafts(target: LlamaForCausalLM) -> None:
    """Also after the tokens have been replaced by those of a state that was saved."""
    head = random_head(target, draft_vocab_size=20)
    rollout = HeadRollout(head, target.get_input_embeddings(), steps=1, decay=1.0)
    before = draft_ids(rollout.head.target_ids, 40)
    assert before.tolist() == [place // 2 if place % 2 == 0 else -1 for place in range(40)]
    head.set_target_ids(torch.arange(20) + 20)
    assert draft_ids(rollout.head.target_ids, 40).tolist() == [-1] * 20 + list(range(20))


def test_a_damaged_shard_is_written_again_as_it_was(target: LlamaForCausalLM, tmp_path: Path) -> None:
    train("head", target, tmp_path)
    path = shard_path(tmp_path / "work", 0)
    before = read_shard(tmp_path / "work", 0)
    path.unlink()
    train("head", target, tmp_path)
    assert torch.equal(read_shard(tmp_path / "work", 0).ids, before.ids)
