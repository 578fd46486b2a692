"""Rows of a benchmark against recorded answers: tokens a step over the number of drafted tokens.

No model runs, so drafters that learn from logits show what they draft without them, and those with a draft model take
no part. Answers are replayed in the order of the file, and a method keeps its memory from one to the next, as it does
on a model. Where it put something there, a second row shows it with every answer alone. Without names the rows are
transformers' rule, prompt lookup as a chain and as trees of 8 to 64 nodes, every other method that drafts from text,
and rivals.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from hf_specdec.errors import ConfigError, counted, unknown_name
from hf_specdec.methods.common.drafter import BaseDrafter
from hf_specdec.methods.common.entry import DrafterContext, MethodState
from hf_specdec.methods.prompt_lookup.config import PromptLookupConfig
from hf_specdec.methods.registry import METHODS, resolve
from hf_specdec.tools.bench.document import Save, add_table
from hf_specdec.tools.bench.header import new_document
from hf_specdec.tools.bench.naming import imported, is_import, is_method, split_config
from hf_specdec.tools.bench.replay import Record, ReplayResult, replay
from hf_specdec.tools.bench.rivals import Racer, SuffixDecoding, SuffixTexts
from hf_specdec.tools.bench.transformers_lookup import TransformersPromptLookup
from hf_specdec.tools.command_errors import within

BRANCHES = 8
BUDGETS = (8, 16, 32, 64)
NOT_BY_DEFAULT = ("plain", "prompt_lookup", "lookahead")  # nothing drafted; has rows of its own; lives on logits
TRANSFORMERS = "transformers prompt lookup"
ALONE = ", each answer alone"
NOTE = "Tokens a step: 1 + accepted drafts, on recorded answers."

Progress = Callable[[str, int, int], None]


@dataclass(frozen=True, slots=True)
class Job:
    """One point of one row: most drafted tokens a step, and how to make the drafter of an answer."""

    name: str
    num_nodes: int
    make: Callable[[MethodState], BaseDrafter]


def replay_rows(
    records: Sequence[Record],
    names: Sequence[str] | None = None,
    progress: Progress | None = None,
    save: Save | None = None,
) -> dict[str, Any]:
    """Measure a row of tokens a step for each drafter, over the number of drafted tokens.

    Args:
        names: methods, methods with configurations (`prompt_lookup:num_branches=4`), or `module:Class`.
        save (*optional*): gets the document so far after each point.
    """
    if not records:
        raise ConfigError("replay", "must hold at least one recorded answer", 0, "Check the file.")
    jobs = _default_jobs() if names is None else [job for name in names for job in _named_jobs(name)]
    chain = TransformersPromptLookup().assisted_budget
    settings = {"num_records": len(records)}
    document = new_document("replay", torch.device("cpu"), settings=settings, notes=[NOTE])
    counts = sorted({chain, *(job.num_nodes for job in jobs)})
    columns = {str(count): f"{{n{count}[tokens_per_step]:.2f}}" for count in counts}
    rows = add_table(document, "tokens a step", {"drafted tokens at most": "{name}", **columns})
    rows.append({"name": TRANSFORMERS, f"n{chain}": replay(TransformersPromptLookup, records).to_dict()})
    by_name = {TRANSFORMERS: rows[0]}
    for number, job in enumerate(jobs):
        if progress is not None:
            progress(f"{job.name}, {counted(job.num_nodes, 'node')}", number, len(jobs))
        for name, result in _results(job, records).items():
            if name not in by_name:
                rows.append(by_name.setdefault(name, {"name": name}))
                if result.needs_logits:
                    document["notes"].append(f"{name} learns from logits too, which a recording does not have.")
            by_name[name][f"n{job.num_nodes}"] = result.to_dict()
        if save is not None:
            save(document)
    document["is_complete"] = True
    return document


def _results(job: Job, records: Sequence[Record]) -> dict[str, ReplayResult]:
    """Results with a memory of the answers before, and where it was used, without one."""
    method_state = MethodState()
    found = {job.name: replay(lambda: job.make(method_state), records, budget=job.num_nodes)}
    if method_state.by_name:
        found[job.name + ALONE] = replay(lambda: job.make(MethodState()), records, budget=job.num_nodes)
    return found


def _default_jobs() -> list[Job]:
    chain, tree = PromptLookupConfig(), {"num_branches": BRANCHES}
    trees = [PromptLookupConfig.parse({**tree, "max_nodes": budget}) for budget in BUDGETS]
    others = [name for name, method in METHODS.items() if not method.needs_model and name not in NOT_BY_DEFAULT]
    return [
        _method_job("prompt_lookup, chain", "prompt_lookup", chain),
        *(_method_job(f"prompt_lookup, {BRANCHES} branches", "prompt_lookup", config) for config in trees),
        *(job for name in others for job in _jobs(name)),
        *(Job("SuffixDecoding", budget, _suffix_decoding) for budget in BUDGETS),
        *(Job("RACER", budget, lambda method_state: Racer()) for budget in BUDGETS),
    ]


def _suffix_decoding(method_state: MethodState) -> BaseDrafter:
    return SuffixDecoding(method_state.of("SuffixDecoding", SuffixTexts))


def _named_jobs(name: str) -> list[Job]:
    """The jobs of a row that was asked for; errors begin with `row`."""
    with within("row"):
        return _jobs(name)


def _jobs(name: str) -> list[Job]:
    if is_import(name):
        factory = imported(name)
        if not isinstance(factory(), BaseDrafter):
            raise ConfigError("row", "must be a Drafter for --replay", name, "Subclass hf_specdec.Drafter.")
        return [Job(name, budget, lambda method_state: factory()) for budget in BUDGETS]
    if not is_method(name):
        raise unknown_name("row", name, METHODS)
    method_name, value = split_config(name)
    config = resolve(method_name).config_class.parse(value, "row")
    whole = _method_job(name, method_name, config)
    smaller = [budget for budget in BUDGETS if budget < whole.num_nodes]
    return [*(Job(name, budget, whole.make) for budget in smaller), whole]


def _method_job(name: str, method_name: str, config: Any) -> Job:
    method = resolve(method_name)
    if method.needs_model:
        raise ConfigError("row", "must draft from the text alone for --replay", name, "Measure it with a model.")
    return Job(name, config.node_budget, lambda method_state: method.make(config, DrafterContext(method_state)))
