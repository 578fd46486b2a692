"""Early exit: the target's own first layers as the draft model of one call, over the target's own cache.

A round's drafts write their keys and values where the target's verify pass would put them. The pass then computes the
layers after the first ones only, from the states that the drafts have left; what was drafted and not scored, a tree's
leaves, goes through the first layers once more in front of it.
Source: https://arxiv.org/abs/2404.16710 (LayerSkip's self-speculation, there for chains).
"""

import copy
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from transformers import PreTrainedModel

from hf_specdec import compat
from hf_specdec.cache.first_layers import FirstLayers
from hf_specdec.cache.rollback import rollback_over
from hf_specdec.common.transfer import HOST
from hf_specdec.common.tree import DraftTree, TreeBuilder
from hf_specdec.compat.placement import device_mesh
from hf_specdec.compat.rotary import position_limit
from hf_specdec.errors import ConfigError
from hf_specdec.forward.networks.early_exit import EarlyExit
from hf_specdec.forward.networks.runner_base import BaseDraftRunner, of_each_row
from hf_specdec.forward.target.adapters import TreeAdapter, adapter_of
from hf_specdec.forward.target.compiled_forward import ForwardWidths
from hf_specdec.forward.target.model_facts import ModelFacts
from hf_specdec.forward.target.model_runner import ModelRunner
from hf_specdec.forward.target.tree_layout import TreeLayout
from hf_specdec.forward.target.tree_mask import TreeMasks
from hf_specdec.methods.common.draft_scorer import cost_ratio
from hf_specdec.methods.common.node_logits import NodeLogits

OWN_CACHE = "Pass assistant_model=hf_specdec.self_draft(model, layers=...), which keeps a cache of its own."


@dataclass(frozen=True, slots=True)
class _Round:
    """Results of the first layers in one round.

    Attributes:
        places: for each row, the number in the scored tree of each node that is verified.
        layouts: each row's columns.
        states: `(batch, C, hidden_size)` of these columns.
    """

    places: list[list[int]]
    layouts: Sequence[TreeLayout]
    states: torch.Tensor


class ExitRunner(BaseDraftRunner):
    """The first layers of a target with the texts of all rows; the same to drafters and the engine as a `DraftRunner`.

    Args:
        model: the target.
        layers (`int`): how many layers draft.
        num_rows (`int`): rows of the call.
        takes_trees (`bool`): whether the target computes siblings.
        resumes (`bool`): whether the target can go on from the first layers' states; if not, it computes them again.
        device: where the logits go.
        facts: what is known of the target's structure.

    Attributes:
        num_resumed (`int`): verify passes that have gone on from the first layers' states.
    """

    source: str = "draft_model"

    def __init__(
        self,
        model: PreTrainedModel,
        layers: int,
        *,
        num_rows: int,
        takes_trees: bool,
        resumes: bool,
        device: torch.device,
        facts: ModelFacts | None = None,
    ) -> None:
        super().__init__(num_rows, is_shared=device_mesh(model) is not None)
        facts = facts or ModelFacts()
        self.takes_trees, self.resumes, self.device = takes_trees, resumes, device
        self.layers, self.parts, self.network = layers, EarlyExit(model, layers, facts), ("first layers", layers)
        self.vocab_size: int = compat.text_config(model.config).vocab_size
        self.relative_cost = facts.of(_relative_cost, model, layers)
        self.max_positions = facts.of(position_limit, model)
        self._adapters = adapter_of(self.parts.draft), adapter_of(self.parts.rest)
        self._masks = TreeMasks(self.parts.draft)
        self._trees: list[DraftTree | None] = [None] * num_rows
        self._target: Callable[[], ModelRunner | None] = lambda: None
        self._first: FirstLayers | None = None
        self._drafting: ModelRunner | None = None  # in a round
        self._states: list[torch.Tensor] = []  # (batch, Q, hidden_size) of each forward of the round
        self.num_resumed = 0
        self._round: _Round | None = None  # that the verify pass goes on from

    @property
    def target(self) -> ModelRunner:
        """The target that these first layers belong to."""
        target = self._target()
        assert target is not None
        return target

    def bind(self, target: ModelRunner) -> None:
        """Draft for this call of the target."""
        self._target, target.early_exit = weakref.ref(target), self

    def room(self) -> int:
        """Number of tokens that may be drafted below the root; 0 while the target has to compute other tokens first."""
        target = self.target
        lacks_text = any(len(text) - 1 > target.num_cached_tokens(row) for row, text in enumerate(target.texts))
        if (lacks_text and not target.lockstep) or target.drops_cache_next():
            return 0
        rooms = [1 << 30, self.target.draft_room]
        if self.max_positions is not None:
            rooms.append(max(self.max_positions - 1 - self.target.position, 0))
        return min(room for room in rooms if room is not None)

    def score(self, trees: Sequence[DraftTree | None]) -> list[NodeLogits]:
        """See `BaseDraftRunner.score`."""
        self.rank_sync.score(trees)
        if self._drafting is None:
            self._drafting = self._begin()
        with self.rank_sync.forward():
            rows = self._compute(self._drafting, trees)
        self._trees = [new or old for new, old in zip(trees, self._trees, strict=True)]
        joined = rows[0] if len(rows) == 1 else torch.cat(rows)  # (nodes of all rows, vocab_size)
        own = joined[:, : self.vocab_size].to(device=self.device, dtype=torch.float32)
        return of_each_row(own, map(len, rows))

    def complete(self, trees: Sequence[DraftTree | None]) -> None:
        """The target is about to compute `trees`: bring their nodes through the first layers, and end the round."""
        drafting, self._drafting, self._round = self._drafting, None, None
        if drafting is None or self._first is None:
            return
        if self.resumes and not any(layout.pending for layout in _layouts_of(drafting)):
            self._round = self._completed(drafting, trees)
        self._first.drop()
        self._forget_round()

    def resume(self, layouts: Sequence[TreeLayout]) -> tuple[PreTrainedModel, TreeAdapter | None] | None:
        """The layers after the first ones, with what these have computed; `None` where there is nothing of it."""
        if self._round is None or self._first is None:
            return None
        found = self._round
        rows, source, target = [], [], []
        of_column = torch.zeros((len(layouts), len(layouts[0])), dtype=torch.long, device=HOST)
        for row, (layout, places, drafted) in enumerate(zip(layouts, found.places, found.layouts, strict=True)):
            for column, place in zip(layout.node_columns, places, strict=True):
                rows.append(row)
                source.append(drafted.node_columns[place])
                target.append(column)
                of_column[row, column] = source[-1]
        self._first.move(rows, source, target)
        all_rows = torch.arange(len(layouts), device=found.states.device)[:, None]
        self.parts.resume_from(found.states[all_rows, of_column.to(found.states.device)])  # (batch, C, hidden_size)
        return self.parts.rest, self._adapters[1]

    def resumed(self, layouts: Sequence[TreeLayout]) -> None:
        """The layers after the first ones have written these columns."""
        assert self._first is not None
        self._round = None
        self.num_resumed += 1
        self._first.count_columns(len(layouts[0]))

    def _begin(self) -> ModelRunner:
        """Drives the first layers for one round, as the target is now."""
        target = self.target
        if target.cache.spec is None:
            raise ConfigError("exit_layer", "must be unset with this cache", self.layers, OWN_CACHE)
        if self._first is None or self._first.whole is not target.cache.spec:
            self._first = FirstLayers(target.cache.spec, self.layers)
        self._first.begin()
        own = copy.copy(target)
        own.model, own.adapter, own.early_exit = self.parts.draft, self._adapters[0], None
        own.cache = rollback_over(self._first.cache, lockstep=target.lockstep)
        inputs = target.step_inputs().over(own.model, self._first.cache, self._masks, own.adapter)
        own._inputs, own._layouts = inputs, []  # noqa: SLF001 a copy of its own
        own._widths, own.compiled = ForwardWidths(None, None), None  # noqa: SLF001
        return own

    def _compute(self, drafting: ModelRunner, trees: Sequence[DraftTree | None]) -> list[torch.Tensor]:
        rows = drafting.forward(trees)
        if _layouts_of(drafting)[0].first_new == 0:
            self._states = []
        if self.resumes:
            self._states.append(self.parts.states)
        return rows

    def _completed(self, drafting: ModelRunner, trees: Sequence[DraftTree | None]) -> _Round | None:
        """The round, all nodes of `trees` scored; `None` where they do not fit what was scored."""
        grown = [_grown(known, tree) for known, tree in zip(self._trees, trees, strict=True) if tree is not None]
        if len(grown) < len(trees) or not (self.takes_trees or all(tree.is_chain for tree, _ in grown)):
            return None
        missing = [
            tree if known is None or len(tree) > len(known) else None
            for known, (tree, _) in zip(self._trees, grown, strict=True)
        ]
        if any(missing):
            drafting.model = self.parts.headless
            self._compute(drafting, missing)
        return _Round([places for _, places in grown], _layouts_of(drafting), torch.cat(self._states, dim=1))

    def _forget_round(self) -> None:
        self._trees = [None] * self.num_rows


def _layouts_of(drafting: ModelRunner) -> Sequence[TreeLayout]:
    """Layouts that each row has written in this round."""
    return drafting._layouts  # noqa: SLF001 a copy of its own


def _grown(known: DraftTree | None, tree: DraftTree) -> tuple[DraftTree, list[int]]:
    """`known` with the nodes of `tree` that it lacks, and where each node of `tree` is in it."""
    builder = TreeBuilder(tree.tokens[0])
    for parent, token in [] if known is None else zip(known.parents[1:], known.tokens[1:], strict=True):
        builder.add(parent, token)
    places = [0]
    for parent, token in zip(tree.parents[1:], tree.tokens[1:], strict=True):
        places.append(builder.add(places[parent], token))
    return builder.build(), places


def _relative_cost(model: PreTrainedModel, layers: int) -> float:
    """Cost of a forward of the first layers over one of the model, roughly."""
    sizes = compat.num_weights(EarlyExit(model, layers).draft), compat.num_weights(model)
    return cost_ratio(sizes, (layers, compat.text_config(model.config).num_hidden_layers))
