"""One row of a call while it is decoded: its text, and those who draft, choose and stop for it."""

from collections.abc import Callable
from typing import Any

import torch

from hf_specdec.distributed.rank_sync import RankSync
from hf_specdec.engine.sampling import Sampler, StopCheck
from hf_specdec.engine.verify import VerifyResult, verify_tree
from hf_specdec.forward.token_buffer import TokenBuffer
from hf_specdec.methods.base import Drafter
from hf_specdec.stats import SpecStats
from hf_specdec.tree import DraftTree

__all__ = ["SequenceState"]


class SequenceState:
    """State of one row.

    Args:
        index (`int`): its place in the batch.
        prompt (`list[int]`): token ids of the prompt without padding; empty where embeddings were given.

    Attributes:
        tree (`DraftTree`): what is being verified.
        visited (`list[int]`): nodes whose rows have decided a token in this step.
        begun (`bool`): whether its drafter has begun.
        finished (`bool`): whether its text has ended; padding may follow in `text`.
        length (`int`): tokens of the text without that padding.
        error (`Exception | None`): what ended the row alone, where rows of one batch are strangers.
        stats (`SpecStats`): its counters, or those of the whole call.
        agreement (`RankSync`): of the processes that decode it; by default this one is alone.
    """

    def __init__(
        self,
        index: int,
        text: TokenBuffer,
        prompt: list[int],
        drafter: Drafter,
        sampler: Sampler,
        stop_check: StopCheck,
        stats: SpecStats,
        rank_sync: RankSync | None = None,
    ) -> None:
        self.index, self.text, self.prompt = index, text, prompt
        self.drafter, self.sampler, self.stop_check = drafter, sampler, stop_check
        self.tree = DraftTree.chain(prompt[-1] if prompt else 0)
        self.visited: list[int] = []
        self.begun = self.finished = False
        self.error: Exception | None = None
        self.stats = stats
        self.length = len(text)
        self.rank_sync = rank_sync or RankSync()

    def begin(self, token: int, logits: torch.Tensor) -> None:
        """Hand the prompt and the first `token` to the drafter."""
        self.begun = True
        self.drafter.begin(self.prompt or [token])
        if self.prompt:
            root = DraftTree.chain(self.prompt[-1])
            self.drafter.observe(root, logits if self.drafter.needs_logits else None, [token])

    def verify(self, tree: DraftTree, on_token: Callable[["SequenceState", int, int], Any]) -> VerifyResult:
        """Verify `tree`; `on_token(row, node, token)` is called for each token chosen, before the stop check."""
        self.tree, self.visited = tree, []
        return verify_tree(tree, lambda node: self.emit(node, on_token))

    def emit(self, node: int, on_token: Callable[["SequenceState", int, int], Any]) -> tuple[int, bool]:
        """Choose the token after `node`, add it to the text; returns it, and whether the text ends with it."""
        self.visited.append(node)
        decide, sampler, stop_check = self.rank_sync.decide, self.sampler, self.stop_check
        token = decide(
            lambda: sampler.choose(node, self.text),
            is_watched=sampler.is_watched,
            confirm=lambda token: sampler.confirm(node, token),
        )
        self.text.append(token)
        self.length += 1
        self.rank_sync.attempt(on_token, self, node, token)
        self.finished = bool(decide(lambda: stop_check(self.text, sampler.scores), is_watched=stop_check.is_watched))
        return token, self.finished

    @property
    def emitted(self) -> list[int]:
        """The tokens behind the prompt, padding left aside."""
        return self.text.tokens[self.text.prompt_length : self.length]

    def pad(self, length: int, token: int) -> None:
        """Padding behind the text, up to `length`."""
        for _ in range(length - len(self.text)):
            self.text.append(token)

    def end(self) -> None:
        """The text is finished or interrupted."""
        if self.begun:
            self.begun = False
            self.drafter.end()
