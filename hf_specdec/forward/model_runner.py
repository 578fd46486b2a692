"""The model of one call: the prompt's forward, then forwards of trees, then what stays in the cache."""

import contextlib
import functools
from collections.abc import Sequence
from typing import Any, Literal

import torch
from transformers import GenerationConfig, PreTrainedModel

from hf_specdec.cache.rollback import rollback_cache
from hf_specdec.cache.static_cache import FixedShapes, StaticSpecCache
from hf_specdec.common.packed_rows import PackedRows
from hf_specdec.common.tree import DraftTree
from hf_specdec.compat import models
from hf_specdec.compat.attention import asks_for_attention
from hf_specdec.compat.caches import attends_to_images, cache_name, cached_length, decoding_cache
from hf_specdec.compat.fingerprint import hooks_of
from hf_specdec.compat.generation import prefill, updated_kwargs
from hf_specdec.compat.state_layers import places_trees
from hf_specdec.errors import UnsupportedModelError
from hf_specdec.forward.compiled_forward import CompiledForward, ForwardWidths, checked_steps
from hf_specdec.forward.inputs import StepInputs, rows_of
from hf_specdec.forward.model_facts import ModelFacts
from hf_specdec.forward.node_outputs import checked_states, states_of
from hf_specdec.forward.recorded.call_forwards import CallForwards
from hf_specdec.forward.state_layers import StateRecorder
from hf_specdec.forward.text_rows import TextRows, TokenBuffer
from hf_specdec.kernels.cpu_kernels import CpuKernels
from hf_specdec.methods.common.node_logits import LogitsRead, NodeLogits, read_rows

Tier = Literal["tree", "chain", "plain"]
RESERVE = 1024  # cache columns allocated at once after the prompt, at most
MAX_UNCACHED = 8  # tokens that a row may have to compute again and still draft
OF_TOKENS = ("attention_mask", "position_ids")  # arguments with a value for each token of a prompt
MAX_DRAFT = 64  # columns that the last step may write beyond the text's end without growing the cache


class ModelRunner:
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
        facts: of the model's structure.
        is_undisturbed: as of `CallForwards`.

    Attributes:
        outputs: the model's output of the last forward.
        kernels (`CpuKernels`): of its forwards on a CPU.
        rows (`TextRows`): the texts of the rows that are left, and their columns.
        forwards (`CallForwards`): computes those that are not compiled.

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
        is_undisturbed: bool = False,
    ) -> None:
        facts = facts or ModelFacts()
        self.model, self.input_ids, self.generation_config = model, input_ids, generation_config
        self.rows, self.keep_cache, self.hidden_layers = TextRows(texts), keep_cache, tuple(hidden_layers)
        length = input_ids.shape[1]
        reserve = min((generation_config.max_length or length + RESERVE) + MAX_DRAFT, length + RESERVE)
        if not facts.of(places_trees, model):
            tier = "chain"
        original, left_out = decoding_cache(model, model_kwargs), attends_to_images(model.config)
        kept = None if fixed is None or compiled is None else compiled.take_cache(len(texts), fixed.capacity)
        self._recorder = StateRecorder(model, facts, is_used=tier == "tree")
        records = bool(self._recorder.layers)
        self.cache = rollback_cache(original, reserve, fixed=fixed, kept=kept, left_out=left_out, records=records)
        self._widths, self.compiled = ForwardWidths(fixed), compiled
        self._checked = checked_steps(fixed)
        self._best: torch.Tensor | None = None  # what a compiled forward chose, `(batch, width)`
        self.kernels = CpuKernels(model, is_compiled=compiled is not None)
        is_recordable = compiled is None and fixed is None
        self.forwards = CallForwards(
            model,
            facts,
            self._recorder,
            self.kernels,
            is_recordable=is_recordable,
            is_undisturbed=is_undisturbed,
        )
        self.tier: Tier = tier if self.cache.spec is not None else "chain"
        self.kwargs = dict(model_kwargs)
        if original is not None:
            self.kwargs[cache_name(model_kwargs)] = self.cache.model_cache
        if self.hidden_layers and self.kwargs.get("output_hidden_states") is not True:
            self.kwargs["output_hidden_states"] = list(self.hidden_layers)
        self.outputs: Any = None
        self._num_read = 0  # tokens of the shortest text that plain generation would have read by the last commit
        self._places: list[slice] = []  # of the last forward's logits, those of each text's new nodes and extra tokens
        self._inputs: StepInputs | None = None
        self._half_done, self._ahead = False, 0
        self._packed: PackedRows | None = None  # of the last forward

    @property
    def position(self) -> int:
        """Position of the longest row's next root, or a little more where the prompt is padded."""
        return self._cached + self._ahead + max(self.rows.num_uncached, default=0)

    @property
    def supports_row_removal(self) -> bool:
        """Returns whether `select` works."""
        return self.cache.supports_row_removal and not self.keep_cache

    @functools.cached_property
    def takes_packed_rows(self) -> bool:
        """True if a forward of rows of different widths computes no padding: asked after the prompt's."""
        shown = any(self.kwargs.get(name) for name in ("output_hidden_states", "output_attentions"))
        is_plain = not (shown or self.hidden_layers or self._recorder.layers)
        is_compiled = self.compiled is not None or models.is_compiled(self.model)
        is_seen = is_compiled or bool(hooks_of(self.model))
        asks = self.kernels.takes_packed_rows and asks_for_attention(self.model)
        return self.tier == "tree" and is_plain and asks and not is_seen and self.step_inputs().takes_packed_rows

    @property
    def texts(self) -> list[TokenBuffer]:
        """Texts of the rows that are left."""
        return self.rows.texts

    def prefill(self, num_tokens: int | None = None) -> None:
        """The prompt's forward by transformers' rules; `outputs.logits[:, -1]` decides the first tokens.

        Args:
            num_tokens: of the prompt, where the rest is fed; 0 where the cache has a beginning already.
        """
        self._half_done = True
        if num_tokens != 0:
            ids, kwargs = self.input_ids[:, :num_tokens], self.kwargs
            if num_tokens:
                cut = {name: kwargs[name][..., :num_tokens] for name in OF_TOKENS if kwargs.get(name) is not None}
                kwargs = {**kwargs, **cut}
            with self.kernels.of_prompts:
                self.outputs = prefill(self.model, ids, self.generation_config, kwargs)
        outputs = self.outputs or {cache_name(self.kwargs): self.cache.model_cache}
        self.kwargs = updated_kwargs(self.model, outputs, self.kwargs)
        self.cache = self.cache.adopt_prefill(self.kwargs.get(cache_name(self.kwargs)))
        if self.cache.model_cache is None:
            raise UnsupportedModelError("it keeps no `Cache` of transformers")
        self._half_done = False
        self.kwargs[cache_name(self.kwargs)] = self.cache.model_cache
        self.kwargs.pop("logits_to_keep", None)
        self.count_positions()

    def count_positions(self) -> None:
        """Once the prompt is read: a caller may count from elsewhere than 0."""
        if (positions := self.kwargs.get("position_ids")) is not None:
            self._ahead = max(int(positions[..., -1].max()) - self._cached, 0)

    def forward(self, trees: Sequence[DraftTree | None]) -> list[torch.Tensor]:
        """Each row's logits, `(new nodes + extra tokens, vocab_size)`, by one forward; `None` computes nothing."""
        if not self.rows.layouts:
            if self._widths.all:
                self._feed_ahead(trees)
            self.rows.begin(self.rows.uncached())
        self._compute(trees)
        places = [layout.new_rows for layout in self.rows.layouts]
        starts = [0] * len(places) if self._packed is None else self._packed.starts
        self._places = [slice(start + new.start, start + new.stop) for start, new in zip(starts, places, strict=True)]
        return [self.outputs.logits[row, new] for row, new in enumerate(self._places)]

    def states_read(self, row: int) -> tuple[torch.Tensor, ...]:
        """`(C, hidden_size)` of each of `hidden_layers`: of a row's nodes, or of the prompt with its padding."""
        states = checked_states(self.model, states_of(self.outputs), self.hidden_layers)
        new = self.rows.layouts[row].new_rows if self.rows.layouts else slice(None)
        return tuple(layer[row, new] for layer in states)

    def node_logits(self, wanted: LogitsRead) -> list[NodeLogits]:
        """Logits of each row's nodes from the last `forward`, or the prompt's last logits."""
        if not self._places:
            return read_rows(self.outputs.logits[:, -1:], [slice(None)] * len(self.outputs.logits), wanted)
        return read_rows(self.outputs.logits, self._places, wanted, best=self._best)

    def _compute(self, trees: Sequence[DraftTree | None]) -> None:
        """The forward itself, in the columns that are there."""
        layouts, counts, spec = self.rows.layouts, self.rows.write(trees), self.cache.spec
        widest = self._widths.of(max(counts), len(counts))
        self._packed = None
        if min(counts) < widest and self.takes_packed_rows and spec is not None:
            self._packed = PackedRows(counts, [length + layouts[0].first_new for length in spec.lengths])
        for layout in layouts:
            layout.pad(widest)
        inputs = self.step_inputs().of(layouts, self.rows.num_cached, self._packed)
        self.cache.checkpoint(layouts[0].first_new)
        self._half_done = True
        if self.compiled is None:
            self.outputs, self._best = self.forwards(inputs, spec, layouts, self._packed), None
        else:
            with self.forwards.computing(spec, layouts, self._packed):
                self.outputs, self._best = self.compiled(self._shape_of(widest), inputs, self._checked)
        if self._packed is not None:
            self.outputs.logits = self.outputs.logits.expand(len(counts), -1, -1)  # any row's are at its `_places`
        self._half_done = False

    def _shape_of(self, width: int) -> tuple[int, ...]:
        """Shape for which a graph is compiled."""
        assert isinstance(self.cache.spec, StaticSpecCache)
        return (len(self.texts), width, self.cache.spec.capacity, *self.hidden_layers)

    def commit(self, paths: Sequence[Sequence[int]]) -> None:
        """Make the nodes in `paths`, one list a row, part of the cached text; forget the other columns."""
        if not (layouts := self.rows.layouts):
            return
        columns = [layout.columns_of(path) for layout, path in zip(layouts, paths, strict=True)]
        self._num_read = min(cached + len(row) for cached, row in zip(self.rows.num_cached, columns, strict=True))
        self.rows.commit(self.cache.commit(columns, len(layouts[0])))

    def forget(self) -> None:
        """Forget what was written since the last commit, so that nothing of it reaches a later forward."""
        self.cache.forget(len(self.rows.layouts[0]))
        self.rows.layouts = []

    def select(self, rows: Sequence[int]) -> None:
        """Go on with these rows only."""
        self.cache.select(rows)
        if self._inputs is not None:
            self._inputs.select(rows)
        else:
            self.kwargs = rows_of(self.kwargs, rows, len(self.rows))
        self.rows.select(rows)

    def reserve_rows(self, rows: int, columns: int) -> None:
        """Others will be admitted: room for `rows` in all, rows x longest text being at most `columns`."""
        if self.cache.spec is not None:
            self.cache.spec.reserve_rows(rows, columns)

    def admit(self, other: "ModelRunner", row: int | None) -> None:
        """Take over the one row of `other`, whose prompt has been read, in the place of `row` or after the last."""
        assert self.cache.spec is not None and other.cache.spec is not None
        self.cache.spec.admit(other.cache.spec, row)
        self.step_inputs().admit(other.step_inputs(), row)
        self.rows.admit(other.rows, row)

    def step_inputs(self) -> StepInputs:
        """Builder of a forward's arguments after the prompt."""
        if self._inputs is None:
            self._inputs = StepInputs(
                self.model,
                self.kwargs,
                self.texts,
                self.rows.num_cached[0],
                reuses_tensors=self._checked is not None,
                always_masks=self.forwards.needs_masks and self.tier == "tree",
            )
        return self._inputs

    def catch_up(self, length: int) -> None:
        """Feed what the cache lacks of the texts' first `length` - 1 tokens."""
        step = max(self._widths.all, default=length)
        for start in range(min(self.rows.num_cached), length - 1, step):
            if any(uncached := self.rows.uncached(end=min(start + step, length - 1))):
                self.feed(uncached)

    def close(self) -> None:
        """Give the caller's cache what plain generation would have left in it, also after an interrupted forward."""
        if self._half_done or self.rows.layouts:
            self.cache.rollback()
            self.rows.layouts = []
        if self.keep_cache:
            if self.cache.spec is None and self.outputs is not None:
                with contextlib.suppress(Exception):  # only after an error, which matters more; nothing is left else
                    self.catch_up(self._num_read + 1)
            self.cache.close()
        self.release()

    def release(self) -> None:
        """Leave the buffers to the next call of the compiled model; nothing is computed any more."""
        if self.compiled is not None and isinstance(self.cache.spec, StaticSpecCache):
            self.compiled.keep_cache(self.cache.spec)

    @property
    def _cached(self) -> int:
        """Tokens of the longest row in the cache; the text's where the cache does not count."""
        if self.cache.spec is not None:
            return max(self.cache.spec.lengths, default=0)
        length = cached_length(self.cache.model_cache)
        return max(self.rows.num_cached) if length is None else length

    def _feed_ahead(self, trees: Sequence[DraftTree | None]) -> None:
        """Feed pending tokens in forwards of their own where they would not fit next to a row's tree."""
        sizes, most = [tree.num_columns if tree is not None else 0 for tree in trees], self._widths.all[-1]
        while any(0 < count > most - size for count, size in zip(self.rows.num_uncached, sizes, strict=True)):
            self.feed(self.rows.uncached(most))

    def feed(self, tokens: Sequence[Sequence[int]]) -> None:
        """Make tokens that follow the cached ones part of the cache; an empty list leaves its row as it is."""
        self.rows.begin([()] * len(tokens))
        self._compute([DraftTree.chain(row[0], row[1:]) if row else None for row in tokens])
        self.commit([range(len(row)) for row in tokens])
