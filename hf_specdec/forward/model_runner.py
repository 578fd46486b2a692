"""The model of one call: the prompt's forward, then forwards of trees, then what stays in the cache."""

import contextlib
import functools
from collections.abc import Callable, Sequence
from typing import Any, Literal

import torch
from transformers import GenerationConfig, PreTrainedModel

from hf_specdec import compat
from hf_specdec.cache.rollback import rollback_cache
from hf_specdec.cache.static_cache import FixedShapes, StaticSpecCache
from hf_specdec.common.packed_rows import PackedRows
from hf_specdec.common.tree import DraftTree
from hf_specdec.compat.attention import asks_for_attention
from hf_specdec.compat.fingerprint import hooks_of
from hf_specdec.compat.rotary import cache_drop_length
from hf_specdec.forward.adapters import adapter_of, places_trees, works_by_hooks
from hf_specdec.forward.checked_steps import checked_steps
from hf_specdec.forward.compiled_forward import CompiledForward, ForwardWidths
from hf_specdec.forward.forward_arguments import rows_of
from hf_specdec.forward.inputs import StepInputs
from hf_specdec.forward.model_facts import ModelFacts
from hf_specdec.forward.prompt import PromptForward
from hf_specdec.forward.rotary import rotary_of
from hf_specdec.forward.state_layers import StateRecorder
from hf_specdec.forward.time_steps import TimeStepLimits
from hf_specdec.forward.token_buffer import TokenBuffer
from hf_specdec.forward.tree_layout import TreeLayout
from hf_specdec.kernels.cpu_kernels import CpuKernels

Tier = Literal["tree", "chain", "plain"]
RESERVE = 1024  # cache columns allocated at once after the prompt, at most
MAX_UNCACHED = 8  # tokens that a row may have to compute again and still draft
MAX_DRAFT = 64  # columns that the last step may write beyond the text's end without growing the cache


class ModelRunner(PromptForward):
    """One call's model.

    Args:
        input_ids: `(batch, prompt_length)`, padded on the left.
        model_kwargs: those that `generate` hands to a decoding method.
        texts: one a row; they grow while the call runs, and the caller appends to them.
        tier: `"tree"` or `"chain"`, as the model's capability says.
        keep_cache: whether anybody will look at the cache in `model_kwargs` afterwards.
        hidden_layers: whose hidden states are kept of every forward; k is `hidden_states[k]` in transformers' numbers.
        fixed: the shapes of all forwards after the prompt, where that cache is a static one.
        compiled: runs these forwards; `None` runs them as they are written.
        facts, rounds_alike: what is known of the model's structure, and of `PromptForward`.

    Attributes:
        outputs: the model's output of the last forward.
        end_drafts: ends a round of drafts that the model's first layers make over its cache, where they do.
        lockstep (`bool`): whether the rows' caches are kept equally long; those ahead compute the same tokens again.

    Raises:
        UnsupportedModelError: the cache cannot be rolled back.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        input_ids: torch.Tensor,
        generation_config: GenerationConfig,
        model_kwargs: dict[str, Any],
        texts: Sequence[TokenBuffer],
        *,
        tier: Tier,
        keep_cache: bool = True,
        hidden_layers: Sequence[int] = (),
        fixed: FixedShapes | None = None,
        compiled: CompiledForward | None = None,
        facts: ModelFacts | None = None,
        rounds_alike: bool = False,
    ) -> None:
        facts, self.rounds_alike = facts or ModelFacts(), rounds_alike
        self.model, self.input_ids, self.generation_config = model, input_ids, generation_config
        self.texts, self.keep_cache, self.hidden_layers = list(texts), keep_cache, tuple(hidden_layers)
        length = input_ids.shape[1]
        reserve = min((generation_config.max_length or length + RESERVE) + MAX_DRAFT, length + RESERVE)
        self.adapter = facts.of(adapter_of, model) if works_by_hooks(model) and tier == "tree" else None
        if self.adapter is None and not facts.of(places_trees, model):
            tier = "chain"  # compiled since it was probed
        self.lockstep = len(texts) > 1 and (tier != "tree" or compat.has_own_input_preparation(model))
        original, left_out = compat.decoding_cache(model, model_kwargs), compat.attends_to_images(model.config)
        kept = None if fixed is None or compiled is None else compiled.take_cache(len(texts), fixed.capacity)
        self._recorder = StateRecorder(model, facts, is_used=tier == "tree")
        records = bool(self._recorder.layers)
        self.cache = rollback_cache(
            original, reserve, self.lockstep, fixed=fixed, kept=kept, left_out=left_out, records=records
        )
        self._widths, self.compiled = ForwardWidths(fixed, compiled), compiled
        self._checked, self._best = None if self.adapter else checked_steps(fixed), None
        self.rotary, self._drop_length = rotary_of(model, facts), facts.of(cache_drop_length, model)
        self._limits, self._kernels = TimeStepLimits(model, facts), CpuKernels(model, is_compiled=compiled is not None)
        self._is_foreign = compat.has_foreign_inputs(model)
        self.tier: Tier = tier if self.cache.takes_trees else "chain"
        self.kwargs = dict(model_kwargs)
        if original is not None:
            self.kwargs[compat.cache_name(model_kwargs)] = self.cache.model_cache
        if self.hidden_layers and self.kwargs.get("output_hidden_states") is not True:
            self.kwargs["output_hidden_states"] = list(self.hidden_layers)
        self.outputs: Any = None
        self.end_drafts: Callable[[], None] | None = None
        self._num_cached = [len(text) for text in self.texts]  # tokens of each text in the cache once the prompt is
        self._num_read = 0  # tokens of the shortest text that plain generation would have read by the last commit
        self._layouts: list[TreeLayout] = []
        self._rows: list[slice] = []  # of the last forward's logits, those of each text's new nodes and extra tokens
        self._inputs: StepInputs | None = None
        self._half_done, self._ahead = False, 0
        self._packed: PackedRows | None = None  # of the last forward

    @property
    def position(self) -> int:
        """Position of the longest row's next root, or a little more where the prompt is padded."""
        return self._cached + self._ahead + max(map(self._num_uncached, range(len(self.texts))), default=0)

    @property
    def draft_room(self) -> int | None:
        """Number of tokens that may be drafted before the model changes its inputs or its cache; `None` for any."""
        if self._is_foreign and (inputs := self.step_inputs()).own is not None:
            return max(inputs.own.room(max(map(len, self.texts)) - 1), 0)
        if self._drop_length is None or self._cached > self._drop_length:
            return None
        room = self._drop_length - max(map(len, self.texts))
        return None if room < 0 and self.drops_cache_next() else max(room, 0)

    @property
    def supports_row_removal(self) -> bool:
        """Returns whether `select` works."""
        return self.cache.supports_row_removal and not (self.keep_cache or compat.has_row_hooks(self.model))

    @functools.cached_property
    def takes_packed_rows(self) -> bool:
        """True if a forward of rows of different widths computes no padding: asked after the prompt's."""
        shown = any(self.kwargs.get(name) for name in ("output_hidden_states", "output_attentions"))
        is_plain = not (shown or self.hidden_layers or self.lockstep or self._recorder.layers or self.rotary)
        is_compiled = self.compiled is not None or compat.is_compiled(self.model)
        is_seen = is_compiled or bool(hooks_of(self.model)) or compat.has_row_hooks(self.model)
        asks = self._kernels.takes_packed_rows and asks_for_attention(self.model)
        return self.tier == "tree" and is_plain and asks and not is_seen and self.step_inputs().takes_packed_rows

    def forward(self, trees: Sequence[DraftTree | None]) -> list[torch.Tensor]:
        """Each row's logits, `(new nodes + extra tokens, vocab_size)`, by one forward; `None` computes nothing."""
        known = [0] * len(self.texts)
        if self.end_drafts is not None:
            self.end_drafts()
        if not self._adopts_next(trees):
            if not self._layouts and self.drops_cache_next():
                self._drop_cache()
            if self._layouts and self.tier == "chain" and len(self.texts) > 1:
                trees, known = self._rewind(trees)
            if not self._layouts:
                self._begin_columns(trees)
            self._compute(trees)
        places = [layout.new_rows for layout in self._layouts]
        starts = [0] * len(places) if self._packed is None else self._packed.starts
        self._rows = [
            slice(start + new.start + skipped, start + new.stop)
            for start, new, skipped in zip(starts, places, known, strict=True)
        ]
        return [self.outputs.logits[row, new] for row, new in enumerate(self._rows)]

    def _begin_columns(self, trees: Sequence[DraftTree | None]) -> None:
        """Layouts for the columns after the cached ones, beginning with what the cache lacks."""
        if len(self.texts) > 1 and not self.cache.keeps_beginnings:
            self._feed_common()
        if self._widths.all and not self.lockstep:
            self._feed_ahead(trees)
        own = self.step_inputs().own if self._is_foreign and self._num_uncached(0) else None
        while own is not None and 0 < self._num_uncached(0) > own.room(self._num_cached[0]):
            self._feed([self._pending(0)[:1]])
        self._layouts = [TreeLayout(self._pending(row)) for row in range(len(self.texts))]

    def _drop_cache(self) -> None:
        """Compute the whole text again in the next forward, all of it as at its present length."""
        assert self.cache.spec is not None
        self.step_inputs().shortest = len(self.texts[0])
        self.cache.spec.crop(-self._cached)
        self._num_cached = [0]

    def _compute(self, trees: Sequence[DraftTree | None], ids: torch.Tensor | None = None) -> None:
        """The forward itself, in the columns that are there; of `ids` where the host does not know them yet."""
        for layout, tree in zip(self._layouts, trees, strict=True):
            layout.write(tree)
        needed = max(len(layout.new_tokens) for layout in self._layouts)
        widest = self._widths.of(needed, self._shape_of, is_one=self.end_drafts is not None)  # whose rounds have one
        counts, spec = [len(layout.new_tokens) for layout in self._layouts], self.cache.spec
        self._packed = None
        if min(counts) < widest and self.takes_packed_rows and spec is not None:
            self._packed = PackedRows(counts, [length + self._layouts[0].first_new for length in spec.lengths])
        for layout in self._layouts:
            layout.pad(widest)
        step_inputs = self.step_inputs()
        inputs = step_inputs.of(self._layouts, self._num_cached, ids, self._packed)
        self.cache.checkpoint(self._layouts[0].first_new)
        self._half_done = True
        adapted = self.adapter.applied(step_inputs.tree) if self.adapter else contextlib.nullcontext()
        rotated = self.rotary.applied(step_inputs.lengths) if self.rotary else contextlib.nullcontext()
        recorded, packing = self._recorder.applied(self.cache.spec, self._layouts), self._kernels.packing(self._packed)
        written = contextlib.nullcontext() if spec is None else spec.packing(self._packed)
        with adapted, rotated, recorded, self._limits, self._kernels, packing, written:
            if self.compiled is None:
                self.outputs, self._best = self.model(**inputs, return_dict=True), None
            else:
                self.outputs, self._best = self.compiled(self._shape_of(widest), inputs, self._checked)
        if self._packed is not None:
            self.outputs.logits = self.outputs.logits.expand(len(counts), -1, -1)  # any row's are at its `_rows`
        self._half_done = False

    def _shape_of(self, width: int) -> tuple[int, ...]:
        """Shape for which a graph is compiled."""
        assert isinstance(self.cache.spec, StaticSpecCache)
        return (len(self.texts), width, self.cache.spec.capacity, *self.hidden_layers)

    def _rewind(self, trees: Sequence[DraftTree | None]) -> tuple[list[DraftTree | None], list[int]]:
        """Forget the uncommitted columns, to compute whole trees again.

        Without a mask of ours, chains of rows with different numbers of uncached tokens cannot grow side by side: the
        padding of one would part the nodes of another. Returns the trees and how many nodes were known.
        """
        known = [len(layout.node_columns) for layout in self._layouts]
        whole = [new or layout.tree for new, layout in zip(trees, self._layouts, strict=True)]
        self.cache.commit([[] for _ in self._layouts], len(self._layouts[0]))
        self._layouts = []
        return whole, known

    def commit(self, paths: Sequence[Sequence[int]]) -> None:
        """Make the nodes in `paths`, one list a row, part of the cached text; forget the other columns."""
        if not self._layouts:
            return
        wanted = [layout.columns_of(path) for layout, path in zip(self._layouts, paths, strict=True)]
        self._num_read = min(cached + len(own) for cached, own in zip(self._num_cached, wanted, strict=True))
        kept = self.cache.commit(wanted, len(self._layouts[0]))
        self._num_cached = [cached + count for cached, count in zip(self._num_cached, kept, strict=True)]
        self._layouts = []

    def select(self, rows: Sequence[int]) -> None:
        """Go on with these rows only."""
        self.next_tokens = None
        self.cache.select(rows)
        if self._inputs is not None:
            self._inputs.select(rows)
        else:
            self.kwargs = rows_of(self.kwargs, rows, len(self.texts))
        self.texts = [self.texts[row] for row in rows]
        self._num_cached = [self._num_cached[row] for row in rows]

    def num_cached_tokens(self, row: int) -> int:
        """Number of tokens of a row's text in the cache."""
        return self._num_cached[row]

    def reserve_rows(self, rows: int, columns: int) -> None:
        """Others will be admitted: room for `rows` in all, rows x longest text being at most `columns`."""
        if self.cache.spec is not None:
            self.cache.spec.reserve_rows(rows, columns)

    def admit(self, other: "ModelRunner", row: int | None) -> None:
        """Take over the one row of `other`, whose prompt has been read, in the place of `row` or after the last."""
        assert self.cache.spec is not None and other.cache.spec is not None
        self.next_tokens = None
        self.cache.spec.admit(other.cache.spec, row)
        self.step_inputs().admit(other.step_inputs(), row)
        at = len(self.texts) if row is None else row
        self.texts[at : at + 1] = other.texts
        self._num_cached[at : at + 1] = other._num_cached  # noqa: SLF001 another of the same class

    def step_inputs(self) -> StepInputs:
        """Builder of a forward's arguments after the prompt."""
        if self._inputs is None:
            self._inputs = StepInputs(
                self.model,
                self.kwargs,
                self.texts,
                self._num_cached[0],
                self.adapter,
                follows_length=self.rotary is not None,
                reuses_tensors=self._checked is not None,
                makes_masks=self.compiled is not None and self.compiled.makes_masks,
            )
        return self._inputs

    def catch_up(self, length: int) -> None:
        """Feed what the cache lacks of the texts' first `length` - 1 tokens."""
        step = 1 if self._is_foreign else max(self._widths.all, default=length)
        for start in range(min(self._num_cached), length - 1, step):
            end = min(start + step, length - 1)
            uncached = [text.tokens[cached:end] for text, cached in zip(self.texts, self._num_cached, strict=True)]
            if any(uncached):
                self._feed(uncached)

    def close(self) -> None:
        """Give the caller's cache what plain generation would have left in it, also after an interrupted forward."""
        if self._half_done or self._layouts or self.end_drafts is not None:
            self.cache.rollback()
            self._layouts = []
        if self.rotary is not None and self._inputs is not None:
            self.rotary.finish(max(map(len, self.texts)) - 1 + self._inputs.first_position, self.model.dtype)
        if self.keep_cache:
            if not self.cache.keeps_beginnings and self.outputs is not None:
                with contextlib.suppress(Exception):  # only after an error, which matters more; nothing is left else
                    self.catch_up(self._num_read + 1)
            self.cache.close()
        self.release()

    def release(self) -> None:
        """Leave the buffers to the next call of the compiled model; nothing is computed any more."""
        if self.compiled is not None and isinstance(self.cache.spec, StaticSpecCache):
            self.compiled.keep_cache(self.cache.spec)

    def drafts_now(self, row: int) -> bool:
        """True if tokens may be drafted: not while a row has much to feed again, so that the cache catches up."""
        return self._num_uncached(row) <= MAX_UNCACHED

    @property
    def _cached(self) -> int:
        """Tokens of the longest row in the cache; the text's where the cache does not count."""
        if self.cache.spec is not None:
            return max(self.cache.spec.lengths, default=0)
        length = compat.cached_length(self.cache.model_cache)
        return max(self._num_cached) if length is None else length

    def _num_uncached(self, row: int) -> int:
        """Tokens that the cache lacks of the text in front of the row's root."""
        return max(len(self.texts[row]) - 1 - self._num_cached[row], 0)

    def _pending(self, row: int) -> list[int]:
        """These tokens."""
        return self.texts[row].tokens[self._num_cached[row] : len(self.texts[row]) - 1]

    def _feed_common(self) -> None:
        """Feed what every row has pending in one forward: those with drafts a batch never keeps whole."""
        common = min(self._num_uncached(row) for row in range(len(self.texts)))
        if common > MAX_UNCACHED:
            self._feed([self._pending(row)[:common] for row in range(len(self.texts))])

    def _feed_ahead(self, trees: Sequence[DraftTree | None]) -> None:
        """Feed pending tokens in forwards of their own where they would not fit next to a row's tree."""
        sizes, most = [tree.num_columns if tree is not None else 0 for tree in trees], self._widths.all[-1]
        while any(0 < self._num_uncached(row) > most - size for row, size in enumerate(sizes)):
            self._feed([self._pending(row)[:most] for row in range(len(self.texts))])

    def _feed(self, tokens: Sequence[Sequence[int]]) -> None:
        """Make tokens that follow the cached ones part of the cache; an empty list leaves its row as it is."""
        trees = [DraftTree.chain(row[0], row[1:]) if row else None for row in tokens]
        self._layouts, self.next_tokens = [TreeLayout(()) for _ in self.texts], None
        self._compute(trees)
        self.commit([range(len(row)) for row in tokens])
