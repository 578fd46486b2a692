"""The corpus of the embedded pair: the CPython standard library's source, split by file, and its tokenizer.

Knows nothing about models. ``TokenStream`` serves random windows of one long token array.
"""

import hashlib
import sysconfig
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from hf_specdec.common.files import is_utf8

NUM_HELD_OUT = 40  # files
VOCAB_SIZE = 4096
END_OF_TEXT = "<|endoftext|>"
# One newline with the indentation after it, a word with one space before it, single digits, runs of symbols.
SPLIT = r"\r?\n[ \t]*| ?[^\W\d]+|\d|[^\s\w]+|\s+?(?=\S)|\s+"


def stdlib_files() -> list[Path]:
    """Every source file of the running interpreter's standard library between 200 and 400,000 bytes, sorted."""
    root = Path(sysconfig.get_path("stdlib"))
    paths = sorted(p for p in root.rglob("*.py") if not {"site-packages", "__pycache__"} & set(p.parts))
    return [p for p in paths if 200 <= p.stat().st_size <= 400_000 and is_utf8(p)]  # some are not


def split_files(files: list[Path]) -> tuple[list[Path], list[Path]]:
    """Files to train on, and the 40 whose path hashes lowest, never trained on: the same ones in every run."""
    root = Path(sysconfig.get_path("stdlib"))
    by_hash = sorted(files, key=lambda p: hashlib.sha256(p.relative_to(root).as_posix().encode()).digest())
    return sorted(by_hash[NUM_HELD_OUT:]), sorted(by_hash[:NUM_HELD_OUT])


def train_tokenizer(files: list[Path]) -> PreTrainedTokenizerFast:
    """Byte-level BPE over `files`; id 0 is the end-of-text token and every byte has an id, so nothing is unknown."""
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(SPLIT), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    bpe.train_from_iterator((p.read_text("utf-8") for p in files), trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=bpe,
        eos_token=END_OF_TEXT,
        pad_token=END_OF_TEXT,
        padding_side="left",
        clean_up_tokenization_spaces=False,
        model_max_length=2048,
    )


def encode(files: list[Path], tokenizer: PreTrainedTokenizerFast) -> np.ndarray:
    """All files as one `uint16` array, an end-of-text token in front of each file. Shape `(num_tokens,)`."""
    pieces: list[np.ndarray] = []
    for ids in tokenizer([p.read_text("utf-8") for p in files], verbose=False)["input_ids"]:
        pieces.append(np.asarray([tokenizer.eos_token_id, *ids], dtype=np.uint16))
    return np.concatenate(pieces)


def pieces(tokens: np.ndarray, starts: np.ndarray, length: int) -> torch.Tensor:
    """The `length` tokens from each start on, `(len(starts), length)`, int64."""
    return torch.from_numpy(np.stack([tokens[start : start + length] for start in starts]).astype(np.int64))


class TokenStream:
    """Endless batches of windows; each epoch starts at a new offset and visits every window once, shuffled."""

    def __init__(self, tokens: np.ndarray, *, window: int, batch_size: int, seed: int) -> None:
        self.tokens, self.window, self.batch_size = tokens, window, batch_size
        self.rng = np.random.default_rng(seed)

    def __iter__(self) -> Iterator[torch.Tensor]:
        """Yields `(batch_size, window)` int64 tensors."""
        while True:
            offset = int(self.rng.integers(self.window))
            starts = np.arange(offset, len(self.tokens) - self.window, self.window)
            self.rng.shuffle(starts)
            for batch in range(0, len(starts) - self.batch_size + 1, self.batch_size):
                yield pieces(self.tokens, starts[batch : batch + self.batch_size], self.window)
