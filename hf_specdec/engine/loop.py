"""The decoding loop of one call: the prompt, then verify steps until every text ends."""

from typing import Any

import torch

from hf_specdec.common.transfer import HOST
from hf_specdec.engine.batch import Batch
from hf_specdec.engine.sequence import SequenceState
from hf_specdec.engine.step import StepRunner


class SpecLoop:
    """Decodes all sequences of a batch to their ends.

    Args:
        steps: takes the batch one step further.
        streamer: a transformers streamer that has seen the prompt already; for one sequence.
        keep_hidden_states (`bool`): collect the hidden states of every emitted token; for one sequence.

    Attributes:
        sequences: all of them, those that have left the batch too.
        hidden_states: a tuple over layers for every emitted token, the prompt's first; `None` where nobody asked.
    """

    def __init__(
        self,
        batch: Batch,
        steps: StepRunner,
        *,
        streamer: Any,
        keep_hidden_states: bool,
    ) -> None:
        self.batch, self.sequences, self.streamer = batch, list(batch.sequences), streamer
        self.rank_sync = steps.rank_sync
        self.hidden_states: list[tuple[torch.Tensor, ...]] | None = [] if keep_hidden_states else None
        self._steps = steps
        if keep_hidden_states or streamer is not None:
            steps.on_token = self._on_token

    def run(self) -> None:
        """Prompt, then steps until every text ends. Whatever happens, the cache is left holding the text."""
        target = self.batch.target
        try:
            self._steps.begin(self.batch)
            while self.batch.num_live:
                self._retire()
                self._steps.run(self.batch)
            self.rank_sync.finish()
            self._pad(self.length)
            if target.keep_cache:
                target.catch_up(self.length)
        except BaseException as error:
            self.rank_sync.abandon(error)
            raise
        finally:
            self.batch.close(*self.sequences)

    @property
    def length(self) -> int:
        """Tokens of the longest text."""
        return max(sequence.length for sequence in self.sequences)

    def _on_token(self, sequence: SequenceState, node: int, token: int) -> None:
        """Tell everyone who listens of an emitted token."""
        if self.hidden_states is not None:
            of_prompt = not self.hidden_states
            self.hidden_states.append(self.batch.target.hidden_states(None if of_prompt else node))
        if self.streamer is not None:
            self.streamer.put(torch.tensor([token], device=HOST))

    def _retire(self) -> None:
        """Take finished sequences out of the batch; where they cannot leave it, they go on with padding."""
        batch = self.batch
        live = [place for place, sequence in enumerate(batch.sequences) if not sequence.finished]
        if len(live) == len(batch.sequences):
            return
        if batch.target.supports_row_removal:
            batch.select(live)
            return
        self._pad(self._padded_length())
        if batch.draft_runner is not None:
            paused = [place for place in range(len(batch.sequences)) if place not in live]
            batch.draft_runner.pause(paused, ahead=batch.limits.max_nodes + 1)

    def _padded_length(self) -> int:
        """Padded length of finished sequences: in lockstep they go ahead, so that no row waits for them."""
        target, limits = self.batch.target, self.batch.limits
        longest = max(sequence.length for sequence in self.batch.sequences)
        if not target.lockstep:
            return longest
        ahead, positions = longest + limits.max_nodes + 1, limits.max_positions
        return ahead if positions is None else max(longest, min(ahead, target.most_tokens(positions)))

    def _pad(self, length: int) -> None:
        for sequence in self.sequences:
            if sequence.finished:
                sequence.pad(length, self.batch.limits.pad_token_id)
