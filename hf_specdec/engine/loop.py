"""The decoding loop of one call: the prompt, then verify steps until every text ends."""

import functools
from collections.abc import Collection
from typing import Any

import torch

from hf_specdec.common.transfer import HOST
from hf_specdec.engine.batch import Batch
from hf_specdec.engine.sequence import SequenceState
from hf_specdec.engine.step import StepRunner
from hf_specdec.forward.hidden_states import Layers, part_of_node, states_of


class SpecLoop:
    """Decodes all sequences of a batch to their ends.

    Args:
        steps: takes the batch one step further.
        streamer: a transformers streamer that has seen the prompt already; for one sequence.
        shows: fields of the output that hold something of each token: `scores`, `logits` and `hidden_states`. With any
            of them the rows stay in the batch, and those that end go on with padding, as in plain generation.

    Attributes:
        sequences: all of them, those that have left the batch too.
        prompt_states: the hidden states that are shown, from the prompts' forward, all rows together.
    """

    def __init__(self, batch: Batch, steps: StepRunner, *, streamer: Any, shows: Collection[str]) -> None:
        self.batch, self.sequences, self.streamer, self.shows = batch, list(batch.sequences), streamer, shows
        self.rank_sync, self._steps = steps.rank_sync, steps
        self.prompt_states: Layers = None
        self._keeps_states = False
        if streamer is not None:
            self._show_tokens()

    def run(self) -> None:
        """Prompt, then steps until every text ends. Whatever happens, the cache is left holding the text."""
        target = self.batch.target
        try:
            self._steps.begin(self.batch)
            if "hidden_states" in self.shows:
                self.prompt_states, self._keeps_states = states_of(target.outputs), True
                self._show_tokens()
            while self.batch.num_live:
                self._retire()
                self._steps.run(self.batch)
            while self.shows and any(len(sequence.text) < self.length for sequence in self.sequences):
                self._steps.run(self.batch)
            self._steps.finish()
            self.rank_sync.finish()
            for sequence in self.sequences:
                sequence.pad(self.length, self.batch.limits.pad_token_id)
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

    def _show_tokens(self) -> None:
        is_alone, on_token = self.rank_sync.is_alone, self._on_token
        self._steps.on_token = on_token if is_alone else functools.partial(self.rank_sync.attempt, on_token)

    def _on_token(self, sequence: SequenceState, node: int, token: int) -> None:
        """Keep what is shown of the forward that led to a token after the first, and hand it to the streamer."""
        if self._keeps_states:
            target, row = self.batch.target, sequence.index
            column, states = target.rows.layouts[row].column_of(node), states_of(target.outputs)
            sequence.shown_states.append(part_of_node(target.model, states, row, column))
        if self.streamer is not None:
            self.streamer.put(torch.tensor([token], device=HOST))

    def _retire(self) -> None:
        """Take finished sequences out of the batch, where they can leave it and nothing is shown of their padding."""
        batch = self.batch
        live = [place for place, sequence in enumerate(batch.sequences) if not sequence.finished]
        if len(live) == len(batch.sequences):
            return
        if batch.target.supports_row_removal and not self.shows:
            batch.select(live)
        elif batch.draft_runner is not None:
            paused = [place for place in range(len(batch.sequences)) if place not in live]
            batch.draft_runner.pause(paused, ahead=batch.limits.max_nodes + 1)
