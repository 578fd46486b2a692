"""Reads a prompt: over the beginning that it has in common with a text of a `PrefixCache`, where texts are kept too.

start = PromptStart(target)
num_cached = start.load(prefixes, key, reuse)
start.read()
"""

import contextlib
import functools
from collections.abc import Hashable, Sequence
from typing import NamedTuple

import torch

from hf_specdec.cache.prefix_cache import PrefixCache, States
from hf_specdec.cache.spec_cache import SpecCache
from hf_specdec.common.tree import DraftTree
from hf_specdec.forward.model_runner import ModelRunner
from hf_specdec.forward.prompt_logits import AskedRow, TopTokens, keeping_states, top_of_prompts

PIECE = 256  # tokens of a prompt in one forward that continues states
MIN_SHARED = 64  # tokens of a prompt for whose states one more forward is worth its time


class Reuse(NamedTuple):
    """Columns of another text that a prompt may start with.

    Attributes:
        step (`int`): their number is a multiple of it; 0 for none.
        least (`int`): tokens that are computed at least.
        takes_answers (`bool`): whether columns of answers serve too, not those of prompts alone.
    """

    step: int
    least: int = 1
    takes_answers: bool = False


class PromptStart:
    """The prompt of a runner.

    Args:
        rounds_alike: whether a token of a step is known to have the same bits beside any others.
    """

    def __init__(self, target: ModelRunner, *, rounds_alike: bool = False) -> None:
        self.target, self.rounds_alike = target, rounds_alike
        self._num_continued = 0  # tokens before loaded states, which transformers' forwards do not continue
        self._num_shared = 0  # tokens after which states are kept
        self._shared_states: States = {}

    @property
    def _cache(self) -> SpecCache:
        assert self.target.cache.spec is not None
        return self.target.cache.spec

    def read(self, wanted: Sequence[AskedRow] = ()) -> list[TopTokens | None]:
        """The prompt's forward. `target.outputs.logits[:, -1]` decides the first tokens.

        Args:
            wanted: the end of each row's prompt after whose tokens somebody wants to know the likeliest ones.

        Returns:
            What was wanted, where this forward has computed it.
        """
        target, states = self.target, list[torch.Tensor]()
        length = target.input_ids.shape[1]
        end = self._num_continued or self._num_shared or length
        keeps = bool(wanted) and end == length
        with keeping_states(target.model, states) if keeps else contextlib.nullcontext():
            target.prefill(0 if self._num_continued else end if end < length else None)
        if end < length:
            self._read_on(end)
        return top_of_prompts(target.model, states, target.outputs.logits[:, -1], wanted)

    def _read_on(self, place: int) -> None:
        """Read the rest of the prompt in forwards that continue states."""
        target, text = self.target, self.target.texts[0].tokens
        target.step_inputs()
        target.rows.num_cached = [place]
        while True:
            if place == self._num_shared:
                self._shared_states = self._cache.states_of(0)
            if place == len(text) - 1:
                break
            end = self._num_shared if place < self._num_shared else len(text) - 1
            target.feed([text[place : min(end, place + PIECE)]])
            (place,) = target.rows.num_cached
        target.forward([DraftTree.chain(text[-1])])
        target.commit([[0]])
        target.count_positions()

    def reuse(self) -> Reuse:
        """Columns of another text that this prompt may start with, so that its own have the bits that they have anyway.

        In halves on a CPU torch computes the layers of prompts, and the core those of steps.
        """
        target = self.target
        if target.hidden_layers or target.cache.spec is None:
            return Reuse(0)
        if not target.kernels.rounds_alike:
            return Reuse(1, takes_answers=True)
        if target.cache.spec.states:
            return Reuse(0)
        if (chunk := target.generation_config.prefill_chunk_size or 0) or not self.rounds_alike:
            return Reuse(chunk)
        least = target.kernels.least_piece
        return Reuse(1, least, takes_answers=least == 1) if least else Reuse(0)

    def load(self, prefixes: PrefixCache, key: Hashable, reuse: Reuse) -> int:
        """Before the prompt is read: start with the beginning that it has in common with a text.

        Returns:
            Its tokens.
        """
        has_states = bool(self._cache.states)
        tokens = self.target.texts[0].tokens[: -reuse.least]
        prefix = prefixes.find(key, tokens, step=reuse.step, needs_states=has_states)
        if has_states and prefix.num_shared - prefix.length >= MIN_SHARED:
            self._num_shared = prefix.num_shared
        if prefix.length:
            self._cache.load(prefix)
            self._num_continued = prefix.length if has_states else 0
        return prefix.length

    def keep(self, prefixes: PrefixCache, key: Hashable, step: int) -> None:
        """Keep what the cache holds of the prompt once it is read, to a multiple of `step` tokens."""
        if self._shared_states:
            tokens = self.target.texts[0].tokens[: self._num_shared]
            prefixes.put(key, tokens, functools.partial(self._cache.columns_of, 0), self._shared_states)
            self._shared_states = {}
        keep_text(self.target, prefixes, key, 0, step)


def keep_text(target: ModelRunner, prefixes: PrefixCache, key: Hashable, row: int, step: int = 1) -> None:
    """Keep what the cache holds of a row's text, to a multiple of `step` tokens; nothing may be uncommitted."""
    assert target.cache.spec is not None
    tokens = target.texts[row].tokens[: target.rows.num_cached[row] // step * step]
    prefixes.put(key, tokens, functools.partial(target.cache.spec.columns_of, row), target.cache.spec.states_of(row))
