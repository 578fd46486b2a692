"""Reads a prompt: over the beginning that it has in common with a text of a `PrefixCache`, where texts are kept too.

start = PromptStart(target)
num_cached = start.load(prefixes, key, reuse)
start.read()

It also finds the likeliest tokens after each token of the prompt, by its last hidden states and a part of the output
head: transformers computes logits of a prompt's last token alone, and of a large vocabulary those of all tokens take
longer than what a draft gains by them. So only some columns are computed: the first token ids, which tokenizers give to
frequent tokens, and the prompt's own tokens.
"""

import contextlib
import functools
from collections.abc import Hashable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn
from transformers import PreTrainedModel

from hf_specdec.cache.prefix_cache import PrefixCache, States
from hf_specdec.cache.spec_cache import SpecCache
from hf_specdec.common.replaced import Replacement, replaced, this_thread
from hf_specdec.common.transfer import to_device
from hf_specdec.common.tree import DraftTree
from hf_specdec.forward.model_runner import ModelRunner
from hf_specdec.forward.node_outputs import TopTokens
from hf_specdec.methods.common.node_logits import read_logits

AskedRow = tuple[Sequence[int], int]  # tokens that end a row's prompt, and how many next tokens of each are wanted

NUM_FREQUENT = 1_024  # token ids looked at besides the prompt's own; all ids bring half a percent more tokens a step
NEAR = 0.02  # that rounding may add to a logit, relative to the largest
PIECE = 256  # tokens of a prompt in one forward that continues states
MIN_SHARED = 64  # tokens of a prompt for whose states one more forward is worth its time


class _Kept(Replacement):
    """Keeps the last hidden states, `(batch, columns, hidden_size)`, that a model's base computes."""

    __slots__ = ()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        output = self.original(*args, **kwargs)
        states = getattr(output, "last_hidden_state", None)
        if this_thread.states is not None and isinstance(states, torch.Tensor) and states.ndim == 3:
            this_thread.states.append(states)
        return output


def keeping_states(model: PreTrainedModel, states: list[torch.Tensor]) -> replaced:
    """A block in which `states` gets the last hidden states of each forward."""
    return replaced([_Kept(model.base_model)], wraps=True, states=states)


def top_of_prompts(
    model: PreTrainedModel, states: Sequence[torch.Tensor], last: torch.Tensor, wanted: Sequence[AskedRow]
) -> list[TopTokens | None]:
    """The likeliest tokens after those asked for, of each row.

    Args:
        states: the last hidden states of the prompts, `(batch, columns, hidden_size)`, in pieces.
        last: `(batch, vocab_size)`, the model's logits after the prompts.

    Returns:
        Those after each token but the last; `None` where nothing was asked for or kept.
    """
    if not states:
        return [None for _ in wanted]
    whole = torch.cat(list(states), dim=1)
    return [
        _top_of_row(model, whole[row, -len(tokens) :], last[row], tokens[-whole.shape[1] :], count) if tokens else None
        for row, (tokens, count) in enumerate(wanted)
    ]


@torch.no_grad()
def _top_of_row(
    model: PreTrainedModel, states: torch.Tensor, last: torch.Tensor, tokens: Sequence[int], count: int
) -> TopTokens | None:
    """Those of one row, of `(n, hidden_size)` states; `None` where these and the head's weights do not make its logits.

    They may be projected, scaled, capped, quantized or on several devices.
    """
    head = model.get_output_embeddings()
    if type(head) is not nn.Linear or type(head.weight) is not nn.Parameter:
        return None
    weight, vocab_size = head.weight, len(last)
    if weight.device != states.device or weight.dtype != states.dtype or weight.shape[1] != states.shape[-1]:
        return None
    if len(weight) < vocab_size or len(tokens) < 2:
        return None
    looked_at = np.union1d(np.arange(min(NUM_FREQUENT, vocab_size)), [token for token in tokens if token < vocab_size])
    if len(looked_at) < count:
        return None
    (ids,) = to_device([looked_at], weight.device)
    logits = nn.functional.linear(states, weight[ids], None if head.bias is None else head.bias[ids])  # (n, ids)
    error = (logits[-1] - last[ids]).abs().max() / last.abs().max()
    if not float(error) <= NEAR:
        return None
    read = read_logits(logits[:-1], count)
    return looked_at[read[:, 1 : 1 + count].astype(np.int64)], read[:, 1 + count :]


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
