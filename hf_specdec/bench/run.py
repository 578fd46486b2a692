"""The measurement: every row on every prompt in turn, round after round, kept as a document that can be continued.

A machine's speed drifts, so the rows take turns on a prompt, beginning with another one for each prompt and round, and
are compared only with the reference beside them. A first round of probed calls warms everything up and looks into each
row; the timed rounds follow. Every row has a memory of its own that is empty when a round begins, so that no call can
draft from an answer to the same prompt.

    bench = Bench(subject, rows, prompts, BenchSettings(rounds=3))
    document = bench.run()
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import transformers

from hf_specdec.bench.conversation import encode, fitting, messages_of
from hf_specdec.bench.document import check_continues, new_document
from hf_specdec.bench.header import header
from hf_specdec.bench.measure import probed_call, timed_call
from hf_specdec.bench.plan import PROBE_ROUND, BenchSettings, Visit, visits
from hf_specdec.bench.prompts import Prompt
from hf_specdec.bench.rows import REFERENCE, Row
from hf_specdec.bench.statistics import summarize
from hf_specdec.bench.subject import Subject
from hf_specdec.errors import ConfigError
from hf_specdec.methods import Memory
from hf_specdec.state import state_of

__all__ = ["Bench"]

WARM_UP_TOKENS = 8

Document = dict[str, Any]
Progress = Callable[[str, int, int], None]
Save = Callable[[Document], None]


class Bench:
    """One run. `document` holds what has been measured so far, at any time.

    Args:
        rows: the reference first.
        left_out: reasons for rows that are not measured, by name.
        document: an earlier document to continue; it must come from the same settings on the same hardware.

    Raises:
        ConfigError: `document` is from something else.
    """

    def __init__(
        self,
        subject: Subject,
        rows: Sequence[Row],
        prompts: Sequence[Prompt],
        settings: BenchSettings,
        *,
        left_out: Mapping[str, str] | None = None,
        document: Document | None = None,
    ) -> None:
        if not rows or rows[0].name != REFERENCE:
            raise ConfigError("rows", f"must begin with {REFERENCE!r}", [row.name for row in rows], "Put it first.")
        self.subject, self.rows, self.settings = subject, list(rows), settings
        fresh = new_document(header(subject), dataclasses.asdict(settings), [row.describe() for row in rows], prompts)
        fresh["left_out"].update(left_out or {})
        if document is not None:
            check_continues(document, fresh)
            document["settings"] = fresh["settings"]
            known = {row["name"] for row in document["rows"]}
            self.rows = [row for row in self.rows if row.name in known]
        self.document = fresh if document is None else document
        self.prompts = fitting(subject, prompts, settings.max_new_tokens)
        if len(self.prompts) < len(prompts):
            what = f"{len(prompts) - len(self.prompts)} of {len(prompts)} prompts"
            self.document["left_out"][what] = "too long for the model's positions"
        self._records: dict[tuple[Any, ...], dict[str, Any]] = {}
        for record in (*self.document["probes"], *self.document["records"]):
            self._records[_key(record, record["row"])] = record
        self._memories: dict[str, Memory] = {}
        self._round: tuple[str, int] | None = None

    def run(self, progress: Progress | None = None, save: Save | None = None) -> Document:
        """Measure what the document does not hold yet.

        Args:
            progress: called before each visit with its description, its number and the number of all.
            save: called after each visit with the document.
        """
        plan = list(visits(self.settings, self.prompts))
        per_round = sum(len(prompt.turns) for prompt in self.prompts)
        state, verbosity = state_of(self.subject.model), transformers.logging.get_verbosity()
        own_memory = state.memory
        transformers.logging.set_verbosity_error()
        self.document["is_complete"] = False
        try:
            self._warm_up()
            for number, visit in enumerate(plan):
                if progress is not None:
                    progress(str(visit), number, len(plan))
                if any(_key(visit.key, row.name) not in self._records for row in self.rows):
                    self._measure(visit, number % per_round + visit.round)
                    if save is not None:
                        save(self.document)
            self.document["is_complete"] = True
        finally:
            state.memory = own_memory
            transformers.logging.set_verbosity(verbosity)
            self.summarize()
        return self.document

    def summarize(self) -> None:
        """Bring the document's summary up to what has been measured."""
        document = self.document
        document["summary"] = summarize(document["records"], document["probes"], document["rows"])

    def _warm_up(self) -> None:
        """A few tokens with every row; transformers' own rows that refuse the model are left out."""
        inputs = self._inputs(Visit(self.settings.modes[0], PROBE_ROUND, self.prompts[0], 0))
        for row in list(self.rows):
            options = {"max_new_tokens": WARM_UP_TOKENS, "do_sample": False}
            state_of(self.subject.model).memory = Memory()
            try:
                timed_call(self.subject, row, inputs, options, self.settings.seed)
            except ValueError as error:
                if row.kind != "transformers":
                    raise
                self.rows.remove(row)
                self.document["rows"] = [known for known in self.document["rows"] if known["name"] != row.name]
                self.document["left_out"][row.name] = " ".join(str(error).split())

    def _measure(self, visit: Visit, first: int) -> None:
        """Run the rows in turn, beginning with number `first` modulo theirs, and keep all their records or none."""
        if self._round != (visit.mode, visit.round):
            self._round = (visit.mode, visit.round)
            self._memories = {row.name: Memory() for row in self.rows}
        inputs = self._inputs(visit)
        start = first % len(self.rows)
        found = {row.name: self._call(visit, row, inputs) for row in self.rows[start:] + self.rows[:start]}
        expected = found[REFERENCE]["token_ids"]
        for row in self.rows:
            record = found[row.name]
            token_ids = record.pop("token_ids")
            record["num_tokens"] = len(token_ids)
            record["equal"] = token_ids == expected
            record["first_difference"] = _first_difference(token_ids, expected)
            if row.name == REFERENCE:
                record["token_ids"] = token_ids
            self._records[_key(record, row.name)] = record
            self.document["probes" if visit.round == PROBE_ROUND else "records"].append(record)

    def _call(self, visit: Visit, row: Row, inputs: Mapping[str, torch.Tensor]) -> dict[str, Any]:
        state_of(self.subject.model).memory = self._memories[row.name]
        call = probed_call if visit.round == PROBE_ROUND else timed_call
        seed = self.settings.seed + max(visit.round, 0)
        outcome = call(self.subject, row, inputs, self.settings.options(visit.mode), seed)
        return {**visit.key, "row": row.name, **dataclasses.asdict(outcome)}

    def _inputs(self, visit: Visit) -> dict[str, torch.Tensor]:
        """What is said in a visit, after earlier turns and the reference's answers to them."""
        earlier = [dataclasses.replace(visit, turn=turn) for turn in range(visit.turn)]
        answers = [self._records[_key(before.key, REFERENCE)]["token_ids"] for before in earlier]
        texts = [self.subject.tokenizer.decode(answer, skip_special_tokens=True) for answer in answers]
        return encode(self.subject, messages_of(visit.prompt, texts), visit.prompt.is_chat)


def _key(record: Mapping[str, Any], row: str) -> tuple[Any, ...]:
    return record["mode"], record["round"], record["prompt"], record["turn"], row


def _first_difference(token_ids: Sequence[int], expected: Sequence[int]) -> int | None:
    """Index of the first token that differs, the shorter's length where one begins the other, `None` if equal."""
    for index, (own, other) in enumerate(zip(token_ids, expected, strict=False)):
        if own != other:
            return index
    return None if len(token_ids) == len(expected) else min(len(token_ids), len(expected))
