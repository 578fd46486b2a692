"""What a model can do, found out by the first tokens of a call: decoded plainly, then tried as trees.

A probe computes texts of its own, as many forwards as a short call has tokens. Here the reference is what the call
decodes anyway, token by token over the model's own cache. After a few tokens the next step computes the same ones once
more, as a tree amid wrong ones with the step's own token at its end; some of them are kept as a draft's accepted tokens
are, and the step after it computes the others as a chain. So each forward of the trial is a wider step of the call.
Only where all logits agree does the call verify drafts from then on; where they do not, or where rounding hides what a
wrong mask would do, the probe decides.
"""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from transformers import PreTrainedModel

from hf_specdec import compat
from hf_specdec.capabilities.random_numbers import random_states, set_random_states
from hf_specdec.capabilities.reference import (
    EXACT,
    MOST_INEXACT,
    NOISE_FACTOR,
    Mismatch,
    allowed_error,
    compare,
    has_own_windows,
    relative_error,
    rounds_exactly,
)
from hf_specdec.compat.masks import has_table_with_window
from hf_specdec.compat.rotary import cache_drop_length
from hf_specdec.forward.adapters import adapter_of, takes_positions
from hf_specdec.forward.inputs import tensors_of
from hf_specdec.forward.model_runner import ModelRunner
from hf_specdec.forward.rotary import rotary_of
from hf_specdec.forward.token_buffer import TokenBuffer
from hf_specdec.forward.tree_mask import TreeMasks
from hf_specdec.tree import DraftTree, TreeBuilder

__all__ = [
    "AFTER_WRONG",
    "NUM_REFERENCES",
    "SHORTEST_CALL",
    "TrialRunner",
    "allowed_after",
    "amid_wrong_ones",
    "beginnings",
    "can_be_tried",
]

NUM_REFERENCES = 4  # tokens whose plain logits are compared with
SHORTEST_CALL = 32  # new tokens of a call in which so many are decoded plainly; shorter ones leave it to the probe
AFTER_WRONG = 3  # a node of the trial's tree
KNOWN_ARGUMENTS = {"attention_mask", "position_ids"}


def can_be_tried(model: PreTrainedModel, model_kwargs: dict[str, Any]) -> bool:
    """Whether a few tokens of this call's text show as much of the model as a probe does.

    They do where attention over transformers' own caches and masks is all there is, and no window is to be passed. In
    train mode a trial's forwards would draw random numbers for dropout that belong to the call.
    """
    cache: Any = model_kwargs.get(compat.cache_name(model_kwargs))
    return (
        not model.training
        and not model.config.is_encoder_decoder
        and type(cache) is compat.DynamicCache
        and not cache.offloading
        and all(type(layer) is compat.DynamicLayer for layer in cache.layers)
        and not cache.get_seq_length()  # which caches without attention layers do not have
        and not tensors_of(model_kwargs).keys() - KNOWN_ARGUMENTS
        and not compat.has_own_input_preparation(model)
        and not compat.is_compiled(model)
        and takes_positions(model)
        and adapter_of(model) is None
        and rotary_of(model) is None
        and cache_drop_length(model) is None
        and TreeMasks(model).supported
        and not has_own_windows(model)
        and not has_table_with_window(model)
    )


class TrialRunner(ModelRunner):
    """Drives a model as plain generation does until it has been tried, and then, if it passes, as `ModelRunner` does.

    Args:
        arguments: as of `ModelRunner`, whose `tier` is `"tree"`.
        decide: called once with the largest error, or `None` where the trial says nothing; returns whether trees are
            verified from then on.
    """

    def __init__(self, *arguments: Any, decide: Callable[[float | None], bool], **others: Any) -> None:
        super().__init__(*arguments, tier="tree", **others)
        self._decide = decide
        self._is_plain, self._is_decided = True, False
        self._name = compat.cache_name(self.kwargs)
        self._own = self.kwargs[self._name] = self.cache.handed_out
        self._own_kwargs: dict[str, Any] = {}
        self._first_kwargs: dict[str, Any] = {}  # as they were after the prompt
        self._references: list[torch.Tensor] = []  # (batch, vocab_size) after each of the first tokens
        self._tolerance, self._noise, self._error = EXACT, 0.0, 0.0
        self._left = [self._try_tree, self._try_chain]  # forwards of the trial
        if not rounds_exactly(self.model):
            self._left.insert(0, self._try_split)
        self._kept: list[list[int]] | None = None  # nodes of the trial's tree that its step keeps
        self._num_wanted = 0  # tokens that plain generation would have read

    def prefill(self) -> Any:
        """The prompt's forward over the model's own cache, whose content is then taken over as another's would be."""
        outputs = super().prefill()
        self._own = self.cache.handed_out
        self._own_kwargs, self._first_kwargs = {**self.kwargs, self._name: self._own}, dict(self.kwargs)
        return outputs

    def forward(self, trees: Sequence[DraftTree | None]) -> list[torch.Tensor]:
        """The roots' logits, as plain generation computes them or as a trial does; after it, all nodes'."""
        self.tells_costs = self._is_decided or len(self._references) < NUM_REFERENCES
        self._num_wanted = len(self.texts[0])
        if not self.tells_costs:
            device = compat.input_device(self.model)
            numbers = random_states(device)
            try:
                return self._left.pop(0)(trees)
            except Exception:  # noqa: BLE001 whatever it was, the probe decides
                set_random_states(device, numbers)  # a forward that draws some is not what it is alone
                self._finish(None)
        if not self._is_plain:
            return super().forward(trees)
        self._decode_plainly(len(self.texts[0]))
        logits: torch.Tensor = self.outputs.logits[:, -1:]  # (batch, 1, vocab_size)
        if not self._is_decided:
            self._references.append(logits[:, 0].float())
        return list(logits)

    def commit(self, paths: Sequence[Sequence[int]]) -> None:
        """Keep the accepted nodes; a plain forward has written its one token already."""
        if self._kept is not None:
            super().commit(self._kept)
            self._kept = None
        elif self._layouts:
            super().commit(paths)
        else:
            self._num_cached = [self._own.get_seq_length()] * len(self.texts)

    def drafts_now(self, row: int) -> bool:
        """Whether tokens may be drafted: not before the model was tried."""
        return not self._is_plain and super().drafts_now(row)

    @property
    def supports_row_removal(self) -> bool:
        """Whether `select` works: not before the model was tried; until then ended rows go on with padding."""
        return not self._is_plain and super().supports_row_removal

    def node_states(self, row: int) -> tuple[torch.Tensor, ...]:
        """None: a call that reads hidden states tries nothing."""
        return ()

    def catch_up(self, length: int) -> None:
        """Feed what the cache lacks."""
        if self._is_plain:
            self._decode_plainly(length - 1)
        else:
            super().catch_up(length)

    def close(self) -> None:
        """Give the caller's cache what plain generation would have left in it; plain forwards have written into it."""
        if not self._is_plain:
            super().close()
        elif self.keep_cache and self._num_wanted > self._own.get_seq_length():  # the trial has read over another cache
            with contextlib.suppress(Exception):  # only after an error, which matters more
                self._decode_plainly(self._num_wanted)

    def _decode_plainly(self, length: int) -> None:
        """Feed the model's own cache, token by token, until it holds `length` tokens."""
        ids = torch.cat([text.ids() for text in self.texts])
        for end in range(self._own.get_seq_length() + 1, length + 1):
            inputs = self.model.prepare_inputs_for_generation(ids[:, :end], next_sequence_length=1, **self._own_kwargs)
            with self._kernels:
                self.outputs = self.model(**inputs, return_dict=True)
            self._own_kwargs = compat.updated_kwargs(self.model, self.outputs, self._own_kwargs)

    def _try_tree(self, trees: Sequence[DraftTree | None]) -> list[torch.Tensor]:
        """The roots' logits, by a forward of the text since the prompt, as a tree amid wrong tokens.

        Raises:
            Mismatch: logits differ from the references by more than rounding explains.
        """
        length, texts = self.input_ids.shape[1], self.texts
        wanted = torch.stack(self._references, dim=1)  # (batch, NUM_REFERENCES, vocab_size)
        self._start_at(self._first_kwargs, length)
        drafted = [amid_wrong_ones(self.model, text.tokens[length:]) for text in texts]
        self.texts = beginnings(texts, [length + 1] * len(texts))
        try:
            rows = super().forward([tree for tree, _ in drafted])
        finally:
            self.texts = texts
        nodes = torch.stack([found[path] for found, (_, path) in zip(rows, drafted, strict=True)]).float()
        if not rounds_exactly(self.model):
            after_wrong = torch.stack([found[AFTER_WRONG] for found in rows]).float()
            influence = relative_error(after_wrong, wanted[:, 2])
            self._tolerance = allowed_after(self.model, noise=self._noise, influence=influence)
        self._error = compare(nodes[:, :NUM_REFERENCES], wanted, self._tolerance)
        self._kept = [path[: 2 + place % 2] for place, (_, path) in enumerate(drafted)]  # different lengths
        self._rows = [slice(path[-1], path[-1] + 1) for _, path in drafted]
        return [self.outputs.logits[row, last] for row, last in enumerate(self._rows)]

    def _try_chain(self, trees: Sequence[DraftTree | None]) -> list[torch.Tensor]:
        """The roots' logits, by a forward of all that the cache lacks since the tree; raises as `_try_tree`."""
        logits, wanted = super().forward(trees), torch.stack(self._references, dim=1)
        for row, new in enumerate(self._rows):
            expected = wanted[row, self._num_cached[row] - self.input_ids.shape[1] :]
            found = self.outputs.logits[row, : new.start][: len(expected)].float()
            self._error = max(self._error, compare(found, expected, self._tolerance))
        self._finish(self._error)
        return logits

    def _try_split(self, trees: Sequence[DraftTree | None]) -> list[torch.Tensor]:
        """In half precision: the last tokens at once over the model's own cache, which shows what rounding does.

        Raises:
            Mismatch: more than it may.
        """
        count = NUM_REFERENCES
        ids = torch.cat([text.ids() for text in self.texts])
        kwargs = compat.updated_kwargs(
            self.model, self.outputs, {**self._first_kwargs, self._name: self._own}, num_new_tokens=count
        )
        with _rewound(self._own, count - 1):
            inputs = self.model.prepare_inputs_for_generation(ids, next_sequence_length=count, **kwargs)
            with self._kernels:
                self.outputs = self.model(**inputs, return_dict=True)
        wanted = torch.stack(self._references[1:], dim=1)
        self._noise = relative_error(self.outputs.logits[:, : count - 1].float(), wanted)
        _check_noise(self._noise)
        return list(self.outputs.logits[:, -1:])

    def _finish(self, error: float | None) -> None:
        """The trial is over; go on as was decided."""
        self._is_decided = True
        self._references.clear()
        self._is_plain = not self._decide(error)
        if error is None or self._is_plain:
            self._go_back()
        if not self._is_plain:
            self._own_kwargs, self._first_kwargs = {}, {}
            for layer in self._own.layers:  # its content is in the other cache, and is put back in the end
                if layer.is_initialized:
                    layer.keys, layer.values = (states[..., :0, :].clone() for states in (layer.keys, layer.values))

    def _go_back(self) -> None:
        """Take over the model's own cache as it is now, whatever the trial did to the other."""
        self._kept, self._rows, self._half_done = None, [], False
        self.cache = self.cache.adopt_prefill(self._own)
        self._start_at({**self._own_kwargs, self._name: self.cache.model_cache}, self._own.get_seq_length())

    def _start_at(self, kwargs: dict[str, Any], length: int) -> None:
        """Go on from a cache of `length` tokens, with what `generate` keeps at that length."""
        self.kwargs, self._num_cached = kwargs, [length] * len(self.texts)
        self._layouts, self._inputs = [], None
        self.step_inputs()


def allowed_after(model: PreTrainedModel, *, noise: float, influence: float) -> float:
    """The tolerance in half precision; see `allowed_error`.

    Raises:
        Mismatch: a wrong token does hardly more than rounding, or rounding more than it may.
    """
    _check_noise(noise)
    allowed = allowed_error(model, noise=noise, influence=influence)
    if influence < 2 * allowed:
        raise Mismatch(f"rounding changes logits by {noise:.1g} of the largest, a wrong token by {influence:.1g}")
    return allowed


def _check_noise(noise: float) -> None:
    if not noise <= MOST_INEXACT / NOISE_FACTOR:
        raise Mismatch(f"tokens at once change logits by {noise:.1g} of the largest")


def amid_wrong_ones(model: PreTrainedModel, tokens: Sequence[int]) -> tuple[DraftTree, list[int]]:
    """A tree with `tokens` among others, and their nodes; `AFTER_WRONG` is the third of them after a wrong one."""
    vocab_size: int = compat.text_config(model.config).vocab_size

    def wrong(token: int) -> int:
        return (token + vocab_size // 2 + 1) % vocab_size

    builder, path = TreeBuilder(tokens[0]), [0]
    aside = builder.add(0, wrong(tokens[1]))
    path.append(builder.add(0, tokens[1]))
    builder.add(aside, tokens[2])
    builder.add(path[-1], wrong(tokens[2]))
    for token in tokens[2:]:
        path.append(builder.add(path[-1], token))
    return builder.build(), path


def beginnings(texts: Sequence[TokenBuffer], lengths: Sequence[int]) -> list[TokenBuffer]:
    """The texts as they were at these lengths."""
    return [TokenBuffer(text.ids()[:, :length], room=1) for text, length in zip(texts, lengths, strict=True)]


@contextlib.contextmanager
def _rewound(cache: Any, count: int) -> Iterator[None]:
    """Without the cache's last `count` tokens for a while; what is written meanwhile is forgotten."""
    content = [(layer.keys, layer.values) for layer in cache.layers]
    cache.crop(-count)
    try:
        yield
    finally:
        for layer, (keys, values) in zip(cache.layers, content, strict=True):
            layer.keys, layer.values = keys, values
