"""Early exit: the target's own first layers as the draft model of one call, over the target's own cache.

A round's drafts write their keys and values where the target's verify pass puts its own, and read the text's. The pass
computes all layers: going on from the drafts' states saves nothing, since a draft's last tokens, which were not scored,
need a forward of the first layers then (measured with two and three of six layers, and with 8 and 15 of thirty).
Source: https://arxiv.org/abs/2404.16710 (LayerSkip's self-speculation).
"""

import copy
import weakref
from collections.abc import Callable, Sequence

import torch
from transformers import PreTrainedModel

from hf_specdec import compat
from hf_specdec.cache.first_layers import first_layers_of
from hf_specdec.cache.rollback import rollback_over
from hf_specdec.cache.spec_cache import SpecCache
from hf_specdec.common.tree import DraftTree
from hf_specdec.compat.devices import device_mesh
from hf_specdec.compat.rotary import position_limit
from hf_specdec.errors import ConfigError
from hf_specdec.forward.compiled_forward import ForwardWidths
from hf_specdec.forward.model_facts import ModelFacts
from hf_specdec.forward.model_runner import ModelRunner
from hf_specdec.forward.networks.layer_cut import first_layers, path_to_layers
from hf_specdec.forward.networks.runner_base import BaseDraftRunner, of_each_row
from hf_specdec.forward.tree_mask import TreeMasks
from hf_specdec.methods.common.draft_scorer import cost_ratio
from hf_specdec.methods.common.node_logits import NodeLogits

OWN_CACHE = "Pass assistant_model=hf_specdec.self_draft(model, layers=...), which keeps a cache of its own."


class ExitRunner(BaseDraftRunner):
    """The first layers of a target with the texts of all rows; the same to drafters and the engine as a `DraftRunner`.

    Args:
        model: the target.
        layers (`int`): how many layers draft.
        num_rows (`int`): rows of the call.
        takes_trees (`bool`): whether the target computes siblings.
        device: where the logits go.
        facts: what is known of the target's structure.
    """

    source: str = "draft_model"

    def __init__(
        self,
        model: PreTrainedModel,
        layers: int,
        *,
        num_rows: int,
        takes_trees: bool,
        device: torch.device,
        facts: ModelFacts | None = None,
    ) -> None:
        super().__init__(num_rows, is_shared=device_mesh(model) is not None)
        facts = facts or ModelFacts()
        self.takes_trees, self.device, self.layers, self.network = takes_trees, device, layers, ("first layers", layers)
        self.model = first_layers(model, layers, facts.of(path_to_layers, model))
        self.vocab_size: int = compat.text_config(model.config).vocab_size
        self.relative_cost = facts.of(_relative_cost, model, layers)
        self.max_positions = facts.of(position_limit, model)
        self._masks = TreeMasks(self.model)
        self._target: Callable[[], ModelRunner | None] = lambda: None
        self._whole: SpecCache | None = None  # the target's cache, and its first layers
        self._first: SpecCache | None = None
        self._drafting: ModelRunner | None = None  # in a round

    @property
    def target(self) -> ModelRunner:
        """The target that these first layers belong to."""
        target = self._target()
        assert target is not None
        return target

    def bind(self, target: ModelRunner) -> None:
        """Draft for this call of the target."""
        self._target, target.end_drafts = weakref.ref(target), self.end_round

    def room(self) -> int:
        """Number of tokens that may be drafted below the root; 0 while the target has to compute other tokens first."""
        target = self.target
        lacks_text = any(len(text) - 1 > target.rows.num_cached[row] for row, text in enumerate(target.texts))
        if lacks_text and not target.lockstep:
            return 0
        rooms = [1 << 30, target.draft_room]
        if self.max_positions is not None:
            rooms.append(max(self.max_positions - 1 - target.position, 0))
        return min(room for room in rooms if room is not None)

    def _answers(self, trees: Sequence[DraftTree | None]) -> list[NodeLogits]:
        """See `BaseDraftRunner`."""
        if self._drafting is None:
            self._drafting = self._begin()
        rows = self._drafting.forward(trees)
        joined = rows[0] if len(rows) == 1 else torch.cat(rows)  # (nodes of all rows, vocab_size)
        own = joined[:, : self.vocab_size].to(device=self.device, dtype=torch.float32)
        return of_each_row(own, map(len, rows))

    def end_round(self) -> None:
        """The target is about to compute: its columns take the place of the drafts'."""
        if self._drafting is not None and self._whole is not None:
            self._whole.rollback()
        self._drafting = None

    def _begin(self) -> ModelRunner:
        """Drives the first layers for one round, as the target is now."""
        target, whole = self.target, self.target.cache.spec
        if whole is None:
            raise ConfigError("exit_layer", "must be unset with this cache", self.layers, OWN_CACHE)
        if self._first is None or self._whole is not whole:
            self._whole, self._first = whole, first_layers_of(whole, self.layers)
        self._first.sync()  # nothing is uncommitted
        own = copy.copy(target)
        own.model, own.end_drafts = self.model, None
        own.cache = rollback_over(self._first, lockstep=target.lockstep)
        inputs = target.step_inputs().over(own.model, self._first, self._masks)
        own._inputs, own.rows = inputs, copy.copy(target.rows)  # noqa: SLF001 a copy of its own
        own.rows.layouts = []
        own.forwards = target.forwards.of(self.model)
        own._widths, own.compiled = ForwardWidths(None, None), None  # noqa: SLF001
        return own

    def _forget_round(self) -> None:
        return


def _relative_cost(model: PreTrainedModel, layers: int) -> float:
    """Cost of a forward of the first layers over one of the model, roughly."""
    sizes = compat.num_weights(first_layers(model, layers)), compat.num_weights(model)
    return cost_ratio(sizes, (layers, compat.text_config(model.config).num_hidden_layers))
