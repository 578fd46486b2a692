"""One model's share of a run: its rows on a prompt in turn, kept in the model's entry of the document.

The rows begin with another one for each prompt and round, and are compared only with the reference besides them. Every
row has a memory of its own that is empty when a round begins, so that no call can draft from an answer to the same
prompt. Knows nothing about other models.
"""

import copy
import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from hf_specdec.engine.model_state import using_method_state
from hf_specdec.methods.common.entry import MethodState
from hf_specdec.tools.bench.conversation import encode, fitting
from hf_specdec.tools.bench.loaded_model import LoadedModel
from hf_specdec.tools.bench.measure import Outcome, measured_call
from hf_specdec.tools.bench.plan import WATCHED_ROUND, BenchSettings, Visit
from hf_specdec.tools.bench.prompts import Prompt
from hf_specdec.tools.bench.rows import OWN_PLAIN, REFERENCE, Row

WARM_UP_TOKENS = 8


class ModelRun:
    """Measurement of one model. `entry` holds its records so far, at any time.

    Args:
        rows: the reference first; those that an earlier run left out are left out again.
        prompts: those that the model has no positions for are left out.
        entry: the model's entry in the document, perhaps from an earlier run.
        method_state: what every row remembers when a round begins; nothing by default.
    """

    def __init__(
        self,
        loaded: LoadedModel,
        rows: Sequence[Row],
        prompts: Sequence[Prompt],
        settings: BenchSettings,
        entry: dict[str, Any],
        method_state: MethodState | None = None,
    ) -> None:
        known = {row["name"] for row in entry["rows"]}
        self.loaded, self.settings, self.entry = loaded, settings, entry
        self.rows = [row for row in rows if row.name in known]
        self.prompts, too_long = fitting(loaded, prompts, settings.max_new_tokens)
        if too_long:
            what = f"{len(prompts) - len(self.prompts)} of {len(prompts)} prompts"
            entry["left_out"][what] = f"too long for the model's positions: {too_long}"
        self._records = {_key(record, record["row"]): record for record in entry["records"]}
        self._method_states: dict[str, MethodState] = {}
        self._known = MethodState() if method_state is None else copy.deepcopy(method_state)
        self._round: tuple[str, int] | None = None

    def warm_up(self) -> None:
        """A few tokens with every row."""
        largest = max(self.prompts, key=lambda prompt: len(prompt.batch))
        inputs = self._inputs(Visit(self.settings.modes[0], WATCHED_ROUND, largest, 0))
        for row in self.rows:
            self._outcome(row, MethodState(), inputs, {"max_new_tokens": WARM_UP_TOKENS, "do_sample": False}, 0, False)

    def measure(self, visit: Visit, first: int) -> bool:
        """Run the rows in turn, beginning with number `first` modulo theirs, and keep all their records or none.

        Returns:
            Whether there was anything to measure.
        """
        if visit.prompt not in self.prompts or all(_key(visit.key, row.name) in self._records for row in self.rows):
            return False
        if self._round != (visit.mode, visit.round):
            self._round = (visit.mode, visit.round)
            self._method_states = {row.name: copy.deepcopy(self._known) for row in self.rows}
        inputs = self._inputs(visit)
        start = first % len(self.rows)
        found = {row.name: self._call(visit, row, inputs) for row in self.rows[start:] + self.rows[:start]}
        expected, plain = found[REFERENCE]["token_ids"], found.get(OWN_PLAIN, {}).get("token_ids")
        for row in self.rows:
            record = found[row.name]
            token_ids = record.pop("token_ids")
            record["num_tokens"] = len(token_ids)
            if "error" not in record:
                record["equal"] = token_ids == expected
                record["equal_to_plain"] = None if plain is None else token_ids == plain
                record["first_difference"] = _first_difference(token_ids, expected)
            if row.name == REFERENCE:
                record["token_ids"] = token_ids
            self._records[_key(record, row.name)] = record
            self.entry["records"].append(record)
        return True

    def _call(self, visit: Visit, row: Row, inputs: Mapping[str, torch.Tensor]) -> dict[str, Any]:
        seed, is_watched = self.settings.seed + max(visit.round, 0), visit.round == WATCHED_ROUND
        options, memory = self.settings.options(visit.mode), self._method_states[row.name]
        outcome = self._outcome(row, memory, inputs, options, seed, is_watched)
        return {**visit.key, "row": row.name, **outcome.record()}

    def _outcome(
        self,
        row: Row,
        memory: MethodState,
        inputs: Mapping[str, torch.Tensor],
        options: dict[str, Any],
        seed: int,
        is_watched: bool,
    ) -> Outcome:
        """Outcome of a call; transformers' own rows may refuse the model or a batch."""
        try:
            with using_method_state(self.loaded.model, memory):
                return measured_call(self.loaded, row, inputs, options, seed, is_watched=is_watched)
        except ValueError as error:
            if row.kind != "transformers":
                raise
            return Outcome([], 0.0, 0.0, error=" ".join(str(error).split()))

    def _inputs(self, visit: Visit) -> dict[str, torch.Tensor]:
        """Inputs of a visit, after earlier turns and the reference's answers to them."""
        earlier = [dataclasses.replace(visit, turn=turn) for turn in range(visit.turn)]
        answers = [self._records[_key(before.key, REFERENCE)]["token_ids"] for before in earlier]
        texts = [self.loaded.tokenizer.decode(answer, skip_special_tokens=True) for answer in answers]
        return encode(self.loaded, visit.prompt, texts)


def _key(record: Mapping[str, Any], row: str) -> tuple[Any, ...]:
    return record["mode"], record["round"], record["prompt"], record["turn"], row


def _first_difference(token_ids: Sequence[int], expected: Sequence[int]) -> int | None:
    """Index of the first token that differs, the shorter's length where one begins the other, `None` if equal."""
    for index, (own, other) in enumerate(zip(token_ids, expected, strict=False)):
        if own != other:
            return index
    return None if len(token_ids) == len(expected) else min(len(token_ids), len(expected))
