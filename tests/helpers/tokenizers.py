"""Tokenizers of the kinds that models have, trained on a few texts.

tokenizer = byte_level(texts, 300)
save_foreign_draft(folder, texts)
"""

from pathlib import Path
from typing import Any

import torch
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from tests.helpers.zoo import DECODER

__all__ = ["byte_level", "characters", "marked", "save_foreign_draft"]


def byte_level(texts: list[str], size: int) -> Any:
    """Byte-level BPE, as GPT-2's: characters may be split between tokens."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=size, special_tokens=["<s>", "</s>"], initial_alphabet=pre_tokenizers.ByteLevel.alphabet()
    )
    tokenizer.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>")


def marked(texts: list[str], size: int) -> Any:
    """BPE with a mark for spaces and bytes for unknown characters, as Llama's: texts begin with a mark."""
    tokenizer = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>"))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    specials = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    tokenizer.train_from_iterator(texts, trainers.BpeTrainer(vocab_size=size, special_tokens=specials))
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, unk_token="<unk>", bos_token="<s>", eos_token="</s>", add_bos_token=True
    )


def characters() -> Any:
    """A token for each printable character, and one for all others."""
    letters = {chr(code): code - 30 for code in range(32, 127)} | {"\n": 1, "<unk>": 0}
    tokenizer = Tokenizer(models.WordLevel(letters, unk_token="<unk>"))
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated"), decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>")


def save_foreign_draft(folder: Path, texts: list[str]) -> str:
    """A tiny random draft model with a tokenizer of 300 tokens, as a checkpoint."""
    tokenizer = byte_level(texts, 300)
    torch.manual_seed(0)
    LlamaForCausalLM(LlamaConfig(**{**DECODER, "vocab_size": len(tokenizer)})).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)
