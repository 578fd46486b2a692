"""Replays recorded answers against a drafter, as if each were the target's greedy output.

No model runs: acceptance depends on the text alone, so answers of a large model judge a drafter on any machine. A
file has one JSON object a line, with `prompt_ids` and `answer_ids`. The first token of an answer comes from the
prompt's forward and counts neither as a token nor as a step. A recording has no logits: drafters that learn from them
see `None`, and are judged by what they draft from the text alone. Knows nothing about time on a device.

    records = read_records("answers.jsonl")
    replay(lambda: PromptLookupDrafter(PromptLookupConfig()), records).tokens_per_step

    python -m hf_specdec.bench.replay answers.jsonl --config "[10, 2]" --config '{"num_branches": 8}' --json
"""

import json
import os
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any, cast

import torch
import typer

from hf_specdec.bench.document import FORMAT, REPLAY
from hf_specdec.bench.header import header
from hf_specdec.bench.text_files import lines_of, read_text
from hf_specdec.bench.transformers_lookup import TransformersPromptLookup
from hf_specdec.errors import ConfigError, SpecError
from hf_specdec.methods.base import Drafter
from hf_specdec.methods.method import DrafterContext, MethodState
from hf_specdec.methods.prompt_lookup.config import PromptLookupConfig
from hf_specdec.methods.registry import resolve
from hf_specdec.tree import DraftTree

__all__ = ["Record", "ReplayResult", "read_records", "replay", "replay_document"]

NO_LIMIT = 2**16  # a budget above any drafter's own
TRANSFORMERS = "transformers prompt lookup"


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
        draft_seconds (`float`): time in the drafter's `propose` and `observe`.
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
        ConfigError: a line is not an object with non-empty lists `prompt_ids` and `answer_ids`.
    """
    file = Path(path)
    return [_record(line, f"{file.name}:{number}") for number, line in lines_of(read_text(file, "replay"))]


def replay(
    drafter_factory: Callable[[], Drafter], records: Iterable[Record], *, budget: int = NO_LIMIT
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
        drafter.observe(DraftTree.chain(record.prompt_ids[-1]), None, record.answer_ids[:1])
        done = 1
        while done < len(record.answer_ids):
            start = time.perf_counter()
            tree = drafter.propose(budget)
            accepted = _verify(tree, record.answer_ids[done:])
            drafter.observe(tree, None, accepted)
            seconds += time.perf_counter() - start
            done += len(accepted)
            num_steps += 1
            num_drafted += tree.num_draft_tokens
        drafter.end()
    return ReplayResult(num_records, num_tokens, num_steps, num_drafted, seconds, needs_logits)


def replay_document(
    records: Sequence[Record], configs: Sequence[PromptLookupConfig], *, transformers: bool = True
) -> dict[str, Any]:
    """Replay under each configuration, and transformers' rule for comparison; a document of kind "replay"."""
    method = resolve("prompt_lookup")
    drafters: dict[str, list[dict[str, Any]]] = {}
    if transformers:
        result = replay(TransformersPromptLookup, records)
        drafters[TRANSFORMERS] = [{"num_nodes": TransformersPromptLookup().assisted_budget, **result.to_dict()}]
    for config in configs:
        context = DrafterContext(MethodState())
        make = partial(method.make, config, context)
        result = replay(make, records)
        drafters.setdefault(_name(config), []).append({"num_nodes": config.node_budget, **result.to_dict()})
    return {"format": FORMAT, "kind": REPLAY, "header": header(torch.device("cpu")), "drafters": drafters}


def _name(config: PromptLookupConfig) -> str:
    shape = "chain" if config.num_branches == 1 else f"{config.num_branches} branches"
    memory = ", shared pool" if config.pool == "shared" else ""
    size = f"{config.max_draft_len} tokens, n-grams of {config.max_matching_ngram_size}"
    return f"prompt lookup, {shape}, {size}{memory}"


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
    try:
        value = json.loads(line)
    except (ValueError, RecursionError):
        value = None
    fields = value if isinstance(value, dict) else {}
    prompt_ids, answer_ids = fields.get("prompt_ids"), fields.get("answer_ids")
    for ids in (prompt_ids, answer_ids):
        if not isinstance(ids, list) or not ids or not all(isinstance(token, int) for token in ids):
            rule = "must be a JSON object with non-empty lists of token ids `prompt_ids` and `answer_ids`"
            raise ConfigError(where, rule, line[:60], "Record one answer a line.")
    return Record(cast("list[int]", prompt_ids), cast("list[int]", answer_ids))


def main(
    file: Annotated[Path, typer.Argument(exists=True, dir_okay=False, help="Recorded answers, JSONL.")],
    config: Annotated[
        list[str] | None, typer.Option(help="A prompt-lookup configuration, list form or dict; may be repeated.")
    ] = None,
    transformers: Annotated[bool, typer.Option(help="Replay transformers' own rule as well.")] = True,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON document on stdout.")] = False,
) -> None:
    """Tokens per verify step of prompt lookup on recorded answers."""
    try:
        configs = [PromptLookupConfig.parse(text, "config") for text in config or ["{}"]]
        document = replay_document(read_records(file), configs, transformers=transformers)
    except SpecError as error:
        typer.echo(f"error: {error}", err=True)
        raise typer.Exit(2) from error
    if as_json:
        typer.echo(json.dumps(document))
        return
    for name, points in document["drafters"].items():
        for point in points:
            typer.echo(f"{point['tokens_per_step']:.3f} tokens, {point['nodes_per_step']:.1f} nodes a step  {name}")


if __name__ == "__main__":
    typer.run(main)
