"""Rows of a benchmark against recorded answers: tokens a step over the number of drafted tokens.

No model runs, so only drafters that need no logits take part. Without names, prompt lookup as a chain and as trees of
8 to 64 nodes stands beside transformers' rule.

    document = replay_rows(read_records("answers.jsonl"), ["prompt_lookup=[10,2]", "my_module:MyDrafter"])
"""

from collections.abc import Callable, Sequence
from typing import Any

from hf_specdec.bench.naming import imported, is_import, split_config
from hf_specdec.bench.replay import Record, replay, replay_document
from hf_specdec.config import PromptLookupConfig
from hf_specdec.drafters.base import Drafter
from hf_specdec.errors import ConfigError
from hf_specdec.methods import Memory, Setup, resolve

__all__ = ["replay_rows"]

BRANCHES = 8
BUDGETS = (8, 16, 32, 64)

Progress = Callable[[str, int, int], None]
Job = tuple[str, int, Callable[[], Drafter]]  # name, most drafted tokens a step, how to make the drafter


def replay_rows(
    records: Sequence[Record], names: Sequence[str] | None = None, progress: Progress | None = None
) -> dict[str, Any]:
    """A document of kind "replay".

    Args:
        names: methods, methods with configurations (`prompt_lookup={"num_branches": 4}`), or `module:Class`.

    Raises:
        ConfigError: an unknown name, or a drafter that needs logits.
    """
    if not records:
        raise ConfigError("replay", "must hold at least one recorded answer", 0, "Check the file.")
    document = replay_document(records, [])
    jobs = _default_jobs() if names is None else [job for name in names for job in _jobs(name)]
    for number, (name, num_nodes, make) in enumerate(jobs):
        if progress is not None:
            progress(f"{name}, {num_nodes} nodes", number, len(jobs))
        result = replay(make, records, budget=num_nodes)
        document["drafters"].setdefault(name, []).append({"num_nodes": num_nodes, **result.to_dict()})
    return {**document, "settings": {"num_records": len(records)}, "is_complete": True}


def _default_jobs() -> list[Job]:
    chain, tree = PromptLookupConfig(), {"num_branches": BRANCHES}
    trees = [PromptLookupConfig.parse({**tree, "max_nodes": budget}) for budget in BUDGETS]
    return [
        _method_job("prompt_lookup, chain", "prompt_lookup", chain),
        *(_method_job(f"prompt_lookup, {BRANCHES} branches", "prompt_lookup", config) for config in trees),
    ]


def _jobs(name: str) -> list[Job]:
    if is_import(name):
        make = imported(name)
        if not isinstance(make(), Drafter):
            raise ConfigError("row", "must be a Drafter for --replay", name, "Subclass hf_specdec.Drafter.")
        return [(name, budget, make) for budget in BUDGETS]
    method_name, value = split_config(name)
    return [_method_job(name, method_name, resolve(method_name).config_class.parse(value, name))]


def _method_job(name: str, method_name: str, config: Any) -> Job:
    method, setup = resolve(method_name), Setup(Memory())
    if method.needs_draft_model or method.make(config, setup).needs_logits:
        raise ConfigError("row", "must draft from the text alone for --replay", name, "Measure it with a model.")
    return name, method.budget(config), lambda: method.make(config, setup)
