"""Replays recorded answers against a drafter, as if each were the target's greedy output.

No model runs: acceptance depends on the text alone, so answers of a large model judge a drafter on any machine. A
file has one JSON object a line, with `prompt_ids` and `answer_ids`. The first token of an answer comes from the
prompt's forward and counts neither as a token nor as a step. A recording has no logits: drafters that learn from them
see `None`, and are judged by what they draft from the text alone. Knows nothing about time on a device.
"""

import os
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from hf_specdec.common.files import check_path, json_value, lines_of, read_text
from hf_specdec.common.tree import DraftTree
from hf_specdec.errors import ConfigError
from hf_specdec.methods.common.drafter import BaseDrafter, DraftRequest, DraftResult

NO_LIMIT = 2**16  # a budget above any drafter's own


@dataclass(frozen=True, slots=True)
class Record:
    """One recorded answer: token ids of the prompt and of what the target answered."""

    prompt_ids: Sequence[int]
    answer_ids: Sequence[int]


@dataclass(frozen=True, slots=True)
class ReplayResult:
    """Counts of a replay.

    Attributes:
        num_records (`int`): answers replayed.
        num_tokens (`int`): their tokens, the first of each left out.
        num_steps (`int`): verify steps.
        num_draft_tokens (`int`): tokens drafted.
        draft_seconds (`float`): time in the drafter's `draft_for` and `learn_from`.
        needs_logits (`bool`): whether the drafter would have learned from logits too.
    """

    num_records: int
    num_tokens: int
    num_steps: int
    num_draft_tokens: int
    draft_seconds: float
    needs_logits: bool = False

    @property
    def tokens_per_step(self) -> float:
        """Tokens that a verify step adds on average; 1 where there was none."""
        return self.num_tokens / self.num_steps if self.num_steps else 1.0

    @property
    def nodes_per_step(self) -> float:
        """Tokens drafted a step on average."""
        return self.num_draft_tokens / self.num_steps if self.num_steps else 0.0

    def to_dict(self) -> dict[str, Any]:
        """All counts and rates as JSON values."""
        names = (*self.__slots__, "tokens_per_step", "nodes_per_step")
        return {name: getattr(self, name) for name in names}


def read_records(path: str | os.PathLike[str]) -> list[Record]:
    """The answers of a JSONL file.

    Raises:
        ConfigError: `path` is none, or the file cannot be read.
    """
    check_path("replay", path, "a file of JSON lines")
    file = Path(path)
    return [_record(line, f"{file.name}:{number}") for number, line in lines_of(read_text(file, "replay"))]


def replay(
    drafter_factory: Callable[[], BaseDrafter], records: Iterable[Record], *, budget: int = NO_LIMIT
) -> ReplayResult:
    """Decode every record's answer with a drafter of its own, verifying against the recorded tokens.

    Args:
        drafter_factory: makes the drafter of one record; drafters may share a pool.
        records: the answers, in the order in which they were asked for.
        budget (`int`, *optional*): most tokens drafted a step; the drafter's own limit applies as well.
    """
    num_records = num_tokens = num_steps = num_drafted = 0
    seconds, needs_logits = 0.0, False
    for record in records:
        drafter = drafter_factory()
        needs_logits |= drafter.needs_logits
        num_records += 1
        num_tokens += len(record.answer_ids) - 1
        drafter.begin(record.prompt_ids)
        drafter.learn_from(DraftResult(DraftTree.chain(record.prompt_ids[-1]), record.answer_ids[:1]))
        done = 1
        while done < len(record.answer_ids):
            start = time.perf_counter()
            tree = drafter.draft_for(DraftRequest(budget))
            accepted = _verify(tree, record.answer_ids[done:])
            drafter.learn_from(DraftResult(tree, accepted))
            seconds += time.perf_counter() - start
            done += len(accepted)
            num_steps += 1
            num_drafted += tree.num_draft_tokens
        drafter.end()
    return ReplayResult(num_records, num_tokens, num_steps, num_drafted, seconds, needs_logits)


def _verify(tree: DraftTree, expected: Sequence[int]) -> Sequence[int]:
    """The tokens a step emits: those of the tree that are expected, and the one after them."""
    node = 0
    for count, token in enumerate(expected, 1):
        child = tree.child(node, token)
        if child is None:
            return expected[:count]
        node = child
    return expected


def _record(line: str, where: str) -> Record:
    value = json_value(line)
    fields = value if isinstance(value, dict) else {}
    prompt_ids, answer_ids = fields.get("prompt_ids"), fields.get("answer_ids")
    for ids in (prompt_ids, answer_ids):
        if not isinstance(ids, list) or not ids or not all(type(token) is int and 0 <= token < 2**31 for token in ids):
            rule = "must be a JSON object with non-empty lists of token ids `prompt_ids` and `answer_ids`"
            raise ConfigError(where, rule, line[:60], "Record one answer a line.")
    return Record(cast("list[int]", prompt_ids), cast("list[int]", answer_ids))
