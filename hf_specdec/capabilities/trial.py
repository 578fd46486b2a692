"""What a model can do, found out by the first tokens of a call: decoded plainly, then tried as trees.

A probe computes texts of its own, as many forwards as a short call has tokens. Here the reference is what the call
decodes anyway, token by token over the model's own cache. After a few tokens the same ones are computed as a tree amid
wrong ones, kept as a draft's accepted tokens are, and followed by a chain: two forwards. Only where all logits agree
does the call verify drafts from then on; where they do not, or where rounding hides what a wrong mask would do, the
probe decides.
"""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from transformers import PreTrainedModel

from hf_specdec import compat
from hf_specdec.capabilities.reference import (
    EXACT,
    Mismatch,
    allowed_error,
    compare,
    has_own_windows,
    relative_error,
    rounds_exactly,
)
from hf_specdec.compat.rotary import cache_drop_length
from hf_specdec.forward.adapters import adapter_of, takes_positions
from hf_specdec.forward.model_runner import ModelRunner
from hf_specdec.forward.rotary import rotary_of
from hf_specdec.forward.token_buffer import TokenBuffer
from hf_specdec.forward.tree_mask import TreeMasks
from hf_specdec.tree import DraftTree, TreeBuilder

__all__ = ["SHORTEST_CALL", "TrialRunner", "can_be_tried"]

NUM_REFERENCES = 5  # tokens after the first whose plain logits are compared with
SHORTEST_CALL = 32  # new tokens of a call in which so many are decoded plainly; shorter ones leave it to the probe
KNOWN_ARGUMENTS = ("attention_mask", "position_ids")


def can_be_tried(model: PreTrainedModel, model_kwargs: dict[str, Any]) -> bool:
    """Whether a few tokens of this call's text show as much of the model as a probe does.

    They do where attention over transformers' own caches and masks is all there is, and no window is to be passed.
    """
    cache: Any = model_kwargs.get(compat.cache_name(model_kwargs))
    return (
        not model.config.is_encoder_decoder
        and type(cache) is compat.DynamicCache
        and not cache.offloading
        and all(type(layer) is compat.DynamicLayer for layer in cache.layers)
        and not cache.get_seq_length()  # which caches without attention layers do not have
        and not any(isinstance(v, torch.Tensor) and name not in KNOWN_ARGUMENTS for name, v in model_kwargs.items())
        and not compat.has_own_input_preparation(model)
        and not compat.is_compiled(model)
        and takes_positions(model)
        and adapter_of(model) is None
        and rotary_of(model) is None
        and cache_drop_length(model) is None
        and TreeMasks(model).supported
        and not has_own_windows(model)
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
        self._logits: list[torch.Tensor] = []  # (batch, vocab_size) after each of the first tokens

    def prefill(self) -> Any:
        """The prompt's forward over the model's own cache, whose content is then taken over as another's would be."""
        outputs = super().prefill()
        self._own = self.cache.handed_out
        self._own_kwargs, self._first_kwargs = {**self.kwargs, self._name: self._own}, dict(self.kwargs)
        return outputs

    def forward(self, trees: Sequence[DraftTree | None]) -> list[torch.Tensor]:
        """The roots' logits, as plain generation computes them; once trees may be verified, all nodes'."""
        if not self._is_plain:
            return super().forward(trees)
        ids = torch.cat([text.ids() for text in self.texts])
        inputs = self.model.prepare_inputs_for_generation(ids, next_sequence_length=1, **self._own_kwargs)
        self.outputs = self.model(**inputs, return_dict=True)
        self._own_kwargs = compat.updated_kwargs(self.model, self.outputs, self._own_kwargs)
        logits = self.outputs.logits[:, -1:]  # (batch, 1, vocab_size)
        if not self._is_decided:
            self._logits.append(logits[:, 0].float())
        return list(logits)

    def commit(self, paths: Sequence[Sequence[int]]) -> None:
        """Keep the accepted nodes; a plain forward has written its one token already."""
        if self._is_plain:
            self._num_cached = [self._own.get_seq_length()] * len(self.texts)
        else:
            super().commit(paths)

    def before_step(self) -> None:
        """Try the model once there is enough to compare with."""
        if self._is_decided or len(self._logits) < NUM_REFERENCES:
            return
        self._is_decided = True
        try:
            error: float | None = self._try(torch.stack(self._logits, dim=1))
        except Exception:  # noqa: BLE001 whatever it was, the probe decides
            error = None
        self._logits.clear()
        self._is_plain = not self._decide(error)
        if error is None or self._is_plain:
            self._go_back()
        if not self._is_plain:
            self._own_kwargs, self._first_kwargs = {}, {}
            for layer in self._own.layers:  # its content is in the other cache, and is put back in the end
                layer.keys, layer.values = (states[..., :0, :].clone() for states in (layer.keys, layer.values))

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
        """Feed what the cache lacks; plain forwards leave nothing out."""
        if not self._is_plain:
            super().catch_up(length)

    def close(self) -> None:
        """Give the caller's cache what plain generation would have left in it; plain forwards have written into it."""
        if not self._is_plain:
            super().close()

    def _try(self, wanted: torch.Tensor) -> float:
        """The largest error of a tree over the first tokens, and of a chain after a commit.

        Args:
            wanted: `(batch, NUM_REFERENCES, vocab_size)`, the logits after each of the first tokens.

        Raises:
            Mismatch: the logits differ by more than rounding explains.
        """
        length = self.input_ids.shape[1]
        tokens = [text.tokens[length : length + NUM_REFERENCES] for text in self.texts]
        tolerance = EXACT if rounds_exactly(self.model) else self._tolerance(wanted)
        self._start_at(self._first_kwargs, length)
        texts = self.texts
        try:
            self.texts = _beginnings(texts, [length + 1] * len(texts))
            trees = [_amid_wrong_ones(row, self._wrong) for row in tokens]
            rows = super().forward([tree for tree, _ in trees])
            nodes = torch.stack([found[path] for found, (_, path) in zip(rows, trees, strict=True)])
            error = compare(nodes.float(), wanted[:, : nodes.shape[1]], tolerance)
            kept = [2 + place % 2 for place in range(len(texts))]  # different lengths, as in a batch that drafts
            super().commit([path[:count] for (_, path), count in zip(trees, kept, strict=True)])
            self.texts = _beginnings(texts, [length + count + 1 for count in kept])
            rows = super().forward(
                [DraftTree.chain(row[count], row[count + 1 :]) for row, count in zip(tokens, kept, strict=True)]
            )
            for found, expected, count in zip(rows, wanted, kept, strict=True):
                error = max(error, compare(found.float(), expected[count:], tolerance))
            super().commit([range(len(found)) for found in rows])
        finally:
            self.texts = texts
        return error

    def _tolerance(self, wanted: torch.Tensor) -> float:
        """What rounding does to the logits where the model computes the first tokens at once, over its own cache.

        Raises:
            Mismatch: a wrong token before them does hardly more.
        """
        length, count = self.input_ids.shape[1], NUM_REFERENCES + 1
        ids = torch.cat([text.ids()[:, : length + NUM_REFERENCES] for text in self.texts])
        middle = length + NUM_REFERENCES // 2 + 1
        wrong = torch.tensor([[self._wrong(int(token))] for token in ids[:, middle]], device=ids.device)
        ids = torch.cat([ids[:, :middle], wrong, ids[:, middle:]], dim=1)  # (batch, length + count)
        kwargs = compat.updated_kwargs(
            self.model, self.outputs, {**self._first_kwargs, self._name: self._own}, num_new_tokens=count - 1
        )
        with _rewound(self._own, NUM_REFERENCES):
            inputs = self.model.prepare_inputs_for_generation(ids, next_sequence_length=count, **kwargs)
            logits = self.model(**inputs, return_dict=True).logits.float()  # (batch, count, vocab_size)
        before = middle - length
        noise = relative_error(logits[:, :before], wanted[:, :before])
        influence = relative_error(logits[:, before + 1 :], wanted[:, before:])
        allowed = allowed_error(self.model, noise=noise, influence=influence)
        if influence < 2 * allowed:
            raise Mismatch(f"rounding changes logits by {noise:.1g} of the largest, a wrong token by {influence:.1g}")
        return allowed

    def _wrong(self, token: int) -> int:
        """Another token."""
        vocab_size: int = compat.text_config(self.model.config).vocab_size
        return (token + vocab_size // 2 + 1) % vocab_size

    def _go_back(self) -> None:
        """Take over the model's own cache as it is now, whatever the trial did to the other."""
        self.cache = self.cache.adopt_prefill(self._own)
        self._start_at({**self._own_kwargs, self._name: self.cache.model_cache}, self._own.get_seq_length())

    def _start_at(self, kwargs: dict[str, Any], length: int) -> None:
        """Go on from a cache of `length` tokens, with what `generate` keeps at that length."""
        self.kwargs, self._num_cached = kwargs, [length] * len(self.texts)
        self._columns, self._inputs = [], None
        self.step_inputs()


def _amid_wrong_ones(tokens: Sequence[int], wrong: Callable[[int], int]) -> tuple[DraftTree, list[int]]:
    """A tree with the first four of `tokens` among others, and their nodes."""
    builder, path = TreeBuilder(tokens[0]), [0]
    aside = builder.add(0, wrong(tokens[1]))
    path.append(builder.add(0, tokens[1]))
    builder.add(aside, tokens[2])
    builder.add(path[-1], wrong(tokens[2]))
    path.append(builder.add(path[-1], tokens[2]))
    path.append(builder.add(path[-1], tokens[3]))
    return builder.build(), path


def _beginnings(texts: Sequence[TokenBuffer], lengths: Sequence[int]) -> list[TokenBuffer]:
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
