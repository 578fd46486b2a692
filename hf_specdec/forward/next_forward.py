"""The forward of the next token, begun on an accelerator before the host has read which token that is.

Where nothing is drafted, a forward's ids are the best tokens of the one before, which are on the device already. The
host reads them, looks for the text's end and prepares one forward more while the device computes.
"""

from abc import abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

import torch

from hf_specdec.common.transfer import PendingRead, is_staged
from hf_specdec.common.tree import DraftTree
from hf_specdec.forward.checked_steps import CheckedSteps
from hf_specdec.forward.hidden_states import HiddenStates
from hf_specdec.forward.inputs import StepInputs
from hf_specdec.forward.rotary import RotaryFrequencies
from hf_specdec.forward.tree_layout import TreeLayout
from hf_specdec.methods.common.node_logits import LogitsRead, NodeLogits, read_rows


class NextForward(HiddenStates):
    """Outputs that `ModelRunner` reads of a forward, and the next forward that it begins meanwhile.

    Attributes:
        next_tokens: of each row, once they are read, what that forward computes; `None` where none was begun.
    """

    kwargs: dict[str, Any]
    end_drafts: Callable[[], None] | None
    rotary: RotaryFrequencies | None
    next_tokens: list[int] | None = None
    _rows: list[slice]
    _best: torch.Tensor | None  # what a compiled forward chose, `(batch, width)`
    _checked: CheckedSteps | None
    _drop_length: int | None

    @abstractmethod
    def step_inputs(self) -> StepInputs:
        """Builder of a forward's arguments."""

    @abstractmethod
    def _shape_of(self, width: int) -> tuple[int, ...]:
        """Key of the compiled graph."""

    @abstractmethod
    def _num_uncached(self, row: int) -> int:
        """Tokens that the cache lacks of the text in front of the row's root."""

    @abstractmethod
    def _compute(self, trees: Sequence[DraftTree | None], ids: torch.Tensor | None = None) -> None:
        """The forward itself; of `ids`, `(batch, 1)`, where the host does not know the trees' last tokens yet."""

    def node_logits(self, wanted: LogitsRead, *, begins_next: bool = False) -> list[NodeLogits]:
        """Logits of each row's nodes from the last `forward`, or the prompt's last logits.

        Args:
            begins_next: whether the next forward computes each row's best token and nothing else, unless a text ends
                before. It may begin now, over the logits that were returned; only the best tokens are known then.
        """
        rows, best = self._rows or [slice(None)] * len(self.outputs.logits), self._best if self._rows else None
        logits = self.outputs.logits if self._rows else self.outputs.logits[:, -1:]
        if not begins_next or best is None or not self._can_begin(best):
            return read_rows(logits, rows, wanted, best=best)
        # A CUDA graph writes over what this forward has returned, and torch lets no one make a view of it from then on.
        ids, parts = best.clone(), [logits[row, own] for row, own in enumerate(rows)]
        read = PendingRead(ids)
        self._compute([DraftTree.chain(layout.new_tokens[0], [0]) for layout in self._layouts], ids)
        tokens = read.wait()
        self.next_tokens = tokens[:, 0].tolist()
        read_of = [tokens[row, own, None] for row, own in enumerate(rows)]  # (1, 1) each
        return [NodeLogits(part, found) for part, found in zip(parts, read_of, strict=True)]

    def _can_begin(self, best: torch.Tensor) -> bool:
        """True if the next forward follows from this one's `best` tokens, no one's code runs in between and it pays."""
        plain_text = self.rotary is None and self._drop_length is None and not self.step_inputs().asks_model
        reads_states = self.hidden_layers or self.kwargs.get("output_hidden_states")
        is_one = best.shape[1] == 1 and all(len(layout) == 1 for layout in self._layouts)
        is_free = self._checked is not None and self.end_drafts is None and not reads_states
        is_recorded = self.compiled is not None and self.compiled.is_recorded(self._shape_of(1))
        return is_one and is_free and plain_text and is_recorded and is_staged(best.device)

    def _adopts_next(self, trees: Sequence[DraftTree | None]) -> bool:
        """Take the forward that was begun for one of these `trees`, where it is; it is forgotten where not."""
        tokens, self.next_tokens = self.next_tokens, None
        if tokens is None or self._layouts or any(map(self._num_uncached, range(len(tokens)))):
            return False
        if [tree and tree.column_tokens for tree in trees] != [(token,) for token in tokens]:
            return False
        self._layouts = [TreeLayout(()) for _ in trees]
        for layout, tree in zip(self._layouts, trees, strict=True):
            layout.write(tree)
        return True
