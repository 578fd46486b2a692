"""The prompt's forward, over the beginning that a `PrefixCache` knows of it, and texts that go into one."""

import contextlib
import functools
from abc import abstractmethod
from collections.abc import Hashable, Sequence
from typing import NamedTuple

import torch
from transformers import GenerationConfig, PreTrainedModel

from hf_specdec import compat
from hf_specdec.cache.prefix_cache import PrefixCache, States
from hf_specdec.cache.rollback import RollbackCache
from hf_specdec.common.tree import DraftTree
from hf_specdec.errors import UnsupportedModelError
from hf_specdec.forward.inputs import StepInputs
from hf_specdec.forward.next_forward import NextForward
from hf_specdec.forward.prompt_logits import AskedRow, TopTokens, kept_states, top_of_prompts
from hf_specdec.forward.token_buffer import TokenBuffer
from hf_specdec.kernels.cpu_kernels import CpuKernels

PIECE = 256  # tokens of a prompt in one forward that continues states
MIN_SHARED = 64  # tokens of a prompt for whose states one more forward is worth its time
OF_TOKENS = ("attention_mask", "position_ids")


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


class PromptForward(NextForward):
    """Reads the prompt of a `ModelRunner`, and keeps texts.

    Attributes:
        rounds_alike (`bool`): whether a token of a step is known to have the same bits beside any others.
    """

    model: PreTrainedModel
    input_ids: torch.Tensor
    generation_config: GenerationConfig
    texts: list[TokenBuffer]
    cache: RollbackCache
    rounds_alike: bool
    _kernels: CpuKernels
    _inputs: StepInputs | None
    _num_cached: list[int]
    _ahead: int
    _half_done: bool
    _num_continued = 0  # tokens of the prompt before loaded states, which transformers' forwards do not continue
    _num_shared = 0  # tokens of the prompt after which states are kept
    _shared_states: States | None = None

    @property
    @abstractmethod
    def _cached(self) -> int:
        """Tokens of the longest row in the cache."""

    @abstractmethod
    def forward(self, trees: Sequence[DraftTree | None]) -> list[torch.Tensor]:
        """A forward of trees."""

    @abstractmethod
    def commit(self, paths: Sequence[Sequence[int]]) -> None:
        """Make nodes part of the cached text."""

    @abstractmethod
    def _feed(self, tokens: Sequence[Sequence[int]]) -> None:
        """Make tokens that follow the cached ones part of the cache."""

    @property
    def inputs_note(self) -> str | None:
        """Reason why tokens were computed one by one from some length on, or `None`."""
        own = None if self._inputs is None else self._inputs.own
        if own is None or own.parts_at is None or own.parts_at >= len(self.texts[0]) - 1:
            return None
        return f"its own code prepares other inputs from token {own.parts_at} on, where one token is computed at a time"

    def forget(self) -> None:
        """Forget what was written since the last commit, so that nothing of it reaches a later forward."""
        self.cache.forget(len(self._layouts[0]))
        self._layouts = []

    def drops_cache_next(self) -> bool:
        """Returns whether plain generation's next forward, of one row, would compute the whole text anew."""
        if (length := self._drop_length) is None or len(self.texts) > 1 or self.cache.spec is None:
            return False
        return len(self.texts[0]) > length >= self._cached

    def prefill(self, asked: Sequence[AskedRow] = ()) -> list[TopTokens | None]:
        """The prompt's forward. `outputs.logits[:, -1]` decides the first tokens.

        Args:
            asked: the end of each row's prompt after whose tokens somebody wants to know the likeliest ones.

        Returns:
            What was asked for, where this forward has computed it.
        """
        length = self.input_ids.shape[1]
        end = self._num_continued or self._num_shared or length
        self._half_done = True
        states: list[torch.Tensor] = []
        if not self._num_continued:
            ids, kwargs = self.input_ids[:, :end], self.kwargs
            if end < length:
                cut = {name: kwargs[name][..., :end] for name in OF_TOKENS if kwargs.get(name) is not None}
                kwargs = {**kwargs, **cut}
            keeping = kept_states(self.model, states) if asked and end == length else contextlib.nullcontext()
            with self._kernels.of_prompts, keeping:
                self.outputs = compat.prefill(self.model, ids, self.generation_config, kwargs)
        outputs = self.outputs or {compat.cache_name(self.kwargs): self.cache.model_cache}
        self.kwargs = compat.updated_kwargs(self.model, outputs, self.kwargs)
        self.cache = self.cache.adopt_prefill(self.kwargs.get(compat.cache_name(self.kwargs)))
        if self.cache.model_cache is None:
            raise UnsupportedModelError("it keeps no `Cache` of transformers")
        self._half_done = False
        self.kwargs[compat.cache_name(self.kwargs)] = self.cache.model_cache
        self.kwargs.pop("logits_to_keep", None)
        if end < length:
            self._read_on(end)
        if (positions := self.kwargs.get("position_ids")) is not None:  # a caller may count from elsewhere than 0
            self._ahead = max(int(positions[..., -1].max()) - self._cached, 0)
        return top_of_prompts(self.model, states, self.outputs.logits[:, -1], asked)

    def _read_on(self, start: int) -> None:
        """Read the rest of the prompt in forwards that continue states."""
        self.step_inputs()
        text, self._num_cached = self.texts[0].tokens, [start]
        while True:
            assert self.cache.spec is not None
            if start == self._num_shared:
                self._shared_states = self.cache.spec.states_of(0)
            if start == len(text) - 1:
                break
            end = self._num_shared if start < self._num_shared else len(text) - 1
            self._feed([text[start : min(end, start + PIECE)]])
            start = self._num_cached[0]
        self.forward([DraftTree.chain(text[-1])])
        self.commit([[0]])

    def reuse(self) -> Reuse:
        """Columns of another text that this prompt may start with, so that its own have the bits that they have anyway.

        In halves on a CPU torch computes the layers of prompts, and the core those of steps.
        """
        if self.hidden_layers or self.cache.spec is None:
            return Reuse(0)
        if not self._kernels.rounds_alike:
            return Reuse(1, takes_answers=True)
        if self.cache.spec.states:
            return Reuse(0)
        if (chunk := self.generation_config.prefill_chunk_size or 0) or not self.rounds_alike:
            return Reuse(chunk)
        least = self._kernels.least_piece
        return Reuse(1, least, takes_answers=least == 1) if least else Reuse(0)

    def start_from(self, prefixes: PrefixCache, key: Hashable, reuse: Reuse) -> int:
        """Before the prompt is read: start with the beginning that it has in common with a text.

        Returns:
            Its tokens.
        """
        assert self.cache.spec is not None
        states = bool(self.cache.spec.states)
        prefix = prefixes.find(key, self.texts[0].tokens[: -reuse.least], step=reuse.step, needs_states=states)
        if states and prefix.num_shared - prefix.length >= MIN_SHARED:
            self._num_shared = prefix.num_shared
        if prefix.length:
            self.cache.spec.load(prefix)
            self._num_continued = prefix.length if states else 0
        return prefix.length

    def keep_text(self, prefixes: PrefixCache, key: Hashable, row: int, step: int = 1) -> None:
        """Keep what the cache holds of a row's text, to a multiple of `step` tokens; nothing may be uncommitted."""
        assert self.cache.spec is not None
        columns = functools.partial(self.cache.spec.columns_of, row)
        ends = [(self._num_cached[row] // step * step, self.cache.spec.states_of(row))]
        if self._shared_states:
            ends.insert(0, (self._num_shared, self._shared_states))
            self._shared_states = {}
        for end, states in ends:
            prefixes.put(key, self.texts[row].tokens[:end], columns, states)
