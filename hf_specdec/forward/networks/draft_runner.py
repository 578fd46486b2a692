"""The draft model of one call: every row's requests answered by one forward, over a cache that is never rebuilt.

After each verify step the draft's cache keeps what it computed for the accepted tokens; what it has not seen of the
text is computed with the next request.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any, Self

import torch
from transformers import GenerationConfig, PreTrainedModel

from hf_specdec.cache.static_cache import FixedShapes
from hf_specdec.common.tree import DraftTree
from hf_specdec.compat.attention import position_limit
from hf_specdec.compat.devices import device_mesh
from hf_specdec.compat.models import text_config
from hf_specdec.forward.compiled_forward import CompiledForward
from hf_specdec.forward.model_facts import ModelFacts
from hf_specdec.forward.model_runner import ModelRunner, Tier
from hf_specdec.forward.networks.runner_base import BaseDraftRunner, network_of, of_each_row
from hf_specdec.forward.text_rows import TokenBuffer
from hf_specdec.methods.common.node_logits import NodeLogits


class DraftRunner(BaseDraftRunner):
    """A draft model with the texts of all rows.

    Args:
        input_ids: `(batch, prompt_length)`, padded on the left as the target's.
        model_kwargs: what the draft's forward gets: a cache of its own, masks, positions, encoder outputs.
        vocab_size (`int`): of the target; the draft's logits are cut or filled to this width.
        relative_cost (`float`): a forward of the draft over one of the target, roughly.
        device: where the logits go.
        fixed, compiled: of `ModelRunner`, where `model_kwargs` hold a static cache.
        facts: what is known of the draft's structure.
    """

    source: str = "draft_model"

    def __init__(
        self,
        model: PreTrainedModel,
        input_ids: torch.Tensor,
        model_kwargs: dict[str, Any],
        *,
        tier: Tier,
        vocab_size: int,
        relative_cost: float,
        device: torch.device,
        room: int = 1024,
        fixed: FixedShapes | None = None,
        compiled: CompiledForward | None = None,
        facts: ModelFacts | None = None,
    ) -> None:
        super().__init__(len(input_ids), is_shared=device_mesh(model) is not None)
        facts = facts or ModelFacts()
        self.vocab_size, self.relative_cost, self.device = vocab_size, relative_cost, device
        self._own_vocab_size: int = text_config(model.config).vocab_size
        input_ids = input_ids.where(input_ids < self._own_vocab_size, 0)
        self.texts = [TokenBuffer(input_ids[row : row + 1], room=room) for row in range(len(input_ids))]
        config = GenerationConfig(max_length=input_ids.shape[1] + room)
        self.compiled, self.network = compiled, (network_of(model), vocab_size)
        arguments = (model, input_ids, config, model_kwargs, self.texts)
        self.target = ModelRunner(*arguments, tier=tier, keep_cache=False, fixed=fixed, compiled=compiled, facts=facts)
        self.max_positions = facts.of(position_limit, model)
        self.takes_trees = self.target.tier == "tree"
        self._trees: list[DraftTree | None] = [None] * len(self.texts)
        self._paths: list[list[int]] = [[] for _ in self.texts]
        self._has_read = self._has_ended = False

    def room(self) -> int:
        """Number of tokens that the draft's positions allow below the root."""
        if self.max_positions is None:
            return 1 << 30
        position = self.target.position if self._has_read else max(len(text) for text in self.texts)
        return int(max(self.max_positions - 1 - position, 0))

    def num_unread(self, place: int) -> int:
        """Tokens of a row's text before the last that are not in the cache."""
        known = self.target.rows.num_cached[place] if self._has_read else 0
        return max(len(self.texts[place]) - 1 - known, 0)

    def _answers(self, trees: Sequence[DraftTree | None]) -> list[NodeLogits]:
        """See `BaseDraftRunner`."""
        self._sync()
        rows = self.target.forward([tree and self._readable(tree) for tree in trees])
        self._trees = [new or old for new, old in zip(trees, self._trees, strict=True)]
        joined = rows[0] if len(rows) == 1 else torch.cat(rows)  # (nodes of all rows, own vocab_size)
        return of_each_row(self._like_the_targets(joined), map(len, rows))

    def keep(self, place: int, accepted: Sequence[int]) -> None:
        """The text of one row goes on; the first time after nodes were scored, note which of them are part of it."""
        tree = self._trees[place]
        if tree is not None and accepted:
            self._paths[place], self._trees[place] = _scored_path(tree, accepted[:-1]), None
        for token in accepted:
            self.texts[place].append(token if token < self._own_vocab_size else 0)
        self._has_ended = True

    def select(self, rows: Sequence[int]) -> None:
        """Go on with these rows of those left."""
        self._sync()
        self.target.select(rows)
        self.texts = [self.texts[row] for row in rows]
        super().select(rows)

    def close(self) -> None:
        """The call has ended."""
        self.target.release()

    def admit(self, other: Self, place: int | None) -> None:
        """Take over the one row of `other`, in place `place` or after the last row."""
        self._sync()
        other._sync()
        self.target.admit(other.target, place)
        at = len(self.texts) if place is None else place
        self.texts[at : at + 1] = other.texts
        super().admit(other, place)

    def _forget_round(self) -> None:
        self._trees, self._paths = [None] * len(self.texts), [[] for _ in self.texts]

    def _sync(self) -> None:
        """Read the prompt if that has not happened yet; give the cache what the last round left of the text."""
        if not self._has_read:
            self._has_read = True
            with self.around(None):
                self.target.prefill()
        if self._has_ended:
            self.target.commit(self._paths)
            self._has_ended = False
            self._forget_round()

    def _readable(self, tree: DraftTree) -> DraftTree:
        """The tree in tokens that the draft has embeddings for: others may be the root, and what processors force."""
        if max(tree.tokens) < self._own_vocab_size:
            return tree
        tokens = tuple(token if token < self._own_vocab_size else 0 for token in tree.tokens)
        return dataclasses.replace(tree, tokens=tokens)

    def _like_the_targets(self, rows: torch.Tensor) -> torch.Tensor:
        """fp32 on the target's device, as wide as the target's: padding ids of either model can never be drafted.

        What a compiled forward has returned is copied: a CUDA graph writes over it in the next one.
        """
        is_lent = self.compiled is not None
        rows = rows[:, : self.vocab_size].to(device=self.device, dtype=torch.float32, copy=is_lent)
        missing = self.vocab_size - rows.shape[1]
        return torch.nn.functional.pad(rows, (0, missing), value=float("-inf")) if missing else rows


def _scored_path(tree: DraftTree, tokens: Sequence[int]) -> list[int]:
    """The root and the nodes below it along `tokens`, as far as they were scored."""
    path = [0]
    for token in tokens:
        child = tree.child(path[-1], token)
        if child is None:
            break
        path.append(child)
    return path
