"""`generate --compare`: a method next to plain `generate` and transformers' own, measured by the bench.

Each round begins with what the model remembered before, so that no call can draft from its own answer.
"""

import dataclasses
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import typer
from transformers import PreTrainedModel

from hf_specdec.engine.model_state import state_of
from hf_specdec.errors import ConfigError
from hf_specdec.methods.prompt_lookup.config import PromptLookupConfig
from hf_specdec.tools.bench.loaded_model import LoadedModel
from hf_specdec.tools.bench.plan import WATCHED_ROUND, BenchSettings
from hf_specdec.tools.bench.prompts import Prompt
from hf_specdec.tools.bench.rows import REFERENCE, Row, transformers_row
from hf_specdec.tools.bench.run import Bench
from hf_specdec.tools.bench.speeds import EXACT_DTYPES, flagged, summarize_again
from hf_specdec.tools.bench.statistics import OVERALL
from hf_specdec.tools.bench.table import Table
from hf_specdec.tools.cli.job import Job
from hf_specdec.tools.cli.report import near_tie_note, note_interrupt, print_json, print_table, progress_bar
from hf_specdec.tools.command_errors import INTERRUPTED, note

PLAIN = "plain generate"
TRANSFORMERS = "transformers prompt lookup"
ASSISTED = "transformers assistant"
COLUMNS = {
    "": "{name}",
    "tokens": "{tokens}",
    "seconds": "{seconds:.2f}",
    "tokens/s": "{tokens_per_second:.1f}",
    "x plain": "{ratio_to_plain:.2f}",
    "x transformers": "{ratio_to_transformers:.2f}",
    "drafted": "{drafted}",
    "accepted": "{accepted}",
    "acceptance length": "{mean_acceptance_length:.2f}",
    "equal to plain": "{prompts_equal_to_plain} of {num_prompts}",
}


def compare_and_print(job: Job, text: str | None, method: Mapping[str, Any], rounds: int, *, as_json: bool) -> None:
    """Continue a prompt, then print a table of the ways to continue it."""
    if method["spec_method"] is None:
        raise ConfigError("compare", "must come with a method", "none", "Use --spec-method prompt_lookup.")
    job, prompts = job.with_prompts(text)
    if job.options["do_sample"] and job.seed is None:
        job = dataclasses.replace(job, seed=0)
    if not as_json:
        job.write(prompts[0], method, is_shown=text is None)
    found = compare_methods(job, prompts, method, rounds)
    for name, reason in found.left_out.items():
        note(f"note: {name} is left out: {reason}")
    if not found.is_complete:
        note_interrupt()
    setting = {**job.setting(method), "num_prompts": len(prompts), "rounds": found.rounds}
    if as_json:
        print_json({**setting, "rows": found.rows, "is_complete": found.is_complete})
    else:
        names = ("model", "dtype", "device", "threads", "num_prompts", "rounds")
        caption = ", ".join(f"{name} {setting[name]}" for name in names)
        print_table(comparison_table(found.rows, len(prompts)), caption)
    is_comparable = method["spec_config"].is_seed_exact or not job.options["do_sample"]
    if is_comparable and not found.rows[-1]["equal_to_plain"] and setting["dtype"] not in EXACT_DTYPES:
        near_tie_note(setting["dtype"])
    if not found.keeps_promise:
        note(f"error: the tokens of {method['spec_method']} differ from those of plain generate", "red")
        raise typer.Exit(1)
    if not found.is_complete:
        raise typer.Exit(INTERRUPTED)


@dataclass(frozen=True, slots=True)
class Comparison:
    """Result of a comparison.

    Attributes:
        rows (`list[dict[str, Any]]`): every way to generate over all prompts, as JSON values. Tokens and seconds are of
            one round, ratios the median over prompts of the median over rounds of the tokens per second of both.
        rounds (`int`): timed rounds that are complete.
        is_complete (`bool`): whether they are all that were asked for.
        left_out (`dict[str, str]`): rows that transformers refuses, and its reasons.
        keeps_promise (`bool`): whether the method gave the tokens that it promises.
    """

    rows: list[dict[str, Any]]
    rounds: int
    is_complete: bool
    left_out: dict[str, str]
    keeps_promise: bool


def compare_methods(job: Job, texts: Sequence[str], how: Mapping[str, Any], rounds: int) -> Comparison:
    """Run every way on every prompt, once to warm up and then `rounds` times; Ctrl-C leaves the complete rounds.

    Args:
        how: the arguments of `generate` that choose the method. With a draft model among them transformers' way is its
            assisted generation with that draft at transformers' own settings; else its prompt lookup.

    Raises:
        KeyboardInterrupt: it came before a timed round was complete.
    """
    method = str(how["spec_method"])
    ours = Row.of_arguments(method, "method", how, is_seed_exact=how["spec_config"].is_seed_exact)
    options = {"temperature": None, **job.options}  # the model's own, where the job says nothing
    mode = "sampled" if options.pop("do_sample") else "greedy"
    settings = BenchSettings(modes=(mode,), rounds=rounds, seed=job.seed or 0, **options)
    before = () if job.system is None else ({"role": "system", "content": job.system},)
    prompts = [Prompt(str(number), "prompts", (text,), job.is_chat, before=before) for number, text in enumerate(texts)]
    loaded = LoadedModel(job.model, job.tokenizer, str(job.model.config.name_or_path))
    bench = Bench(
        [loaded], prompts, settings, rows=[_transformers_way(how), ours], method_state=state_of(job.model).method_state
    )
    try:
        with progress_bar() as progress:
            bench.run(progress)
    except KeyboardInterrupt:
        rounds = _keep_whole_rounds(bench)
        if rounds < 1:
            raise
    document = bench.document
    (entry,) = document["models"]
    summaries = entry["summary"][mode]
    refusing = {name: next(iter(summary["errors"])) for name, summary in summaries.items() if summary["errors"]}
    rows = [_row(name, summaries[name], entry, len(prompts), rounds) for name in summaries if name not in refusing]
    keeps_promise = all(flag.row != method for flag in flagged(document))
    return Comparison(rows, rounds, document["is_complete"], entry["left_out"] | refusing, keeps_promise)


def _keep_whole_rounds(bench: Bench) -> int:
    """Drop what an interrupted round measured; returns how many timed rounds are left."""
    (entry,) = bench.document["models"]
    counts = Counter(record["round"] for record in entry["records"])
    kept = [number for number, count in counts.items() if count == counts[WATCHED_ROUND]]
    entry["records"] = [record for record in entry["records"] if record["round"] in kept]
    summarize_again(bench.document)
    return len(kept) - 1


def _transformers_way(how: Mapping[str, Any]) -> Row:
    """transformers' counterpart of a method."""
    if isinstance(how.get("assistant_model"), PreTrainedModel):
        taken = ("assistant_model", "tokenizer", "assistant_tokenizer")
        return transformers_row(ASSISTED, {name: how[name] for name in taken if name in how})
    config = how["spec_config"]
    alike = config if isinstance(config, PromptLookupConfig) else PromptLookupConfig()
    names = {"prompt_lookup_num_tokens": "max_draft_len", "max_matching_ngram_size": "max_matching_ngram_size"}
    return transformers_row(TRANSFORMERS, {theirs: getattr(alike, own) for theirs, own in names.items()})


def _row(
    name: str, summary: Mapping[str, Any], entry: Mapping[str, Any], num_prompts: int, rounds: int
) -> dict[str, Any]:
    watched = [record for record in entry["records"] if record["row"] == name and record["round"] == WATCHED_ROUND]
    ratios = [speed[OVERALL]["median"] for speed in summary["speed_against"].values() if speed]
    return {
        "name": PLAIN if name == REFERENCE else name,
        "tokens": summary["num_tokens"] // rounds,
        "seconds": summary["num_tokens"] / rounds / summary["tokens_per_second"],
        "tokens_per_second": summary["tokens_per_second"],
        "ratio_to_plain": summary["speed"][OVERALL]["median"],
        "ratio_to_transformers": next(iter(ratios), None),
        "drafted": sum(record["num_draft_tokens"] for record in watched),
        "accepted": sum(tokens - 1 for record in watched for tokens in record["blocks"]),
        "mean_acceptance_length": summary["tokens_per_step"][OVERALL],
        "prompts_equal_to_plain": round(summary["share_equal"] * num_prompts),
        "equal_to_plain": summary["share_equal"] == 1.0,
    }


def comparison_table(rows: Sequence[Mapping[str, Any]], num_prompts: int) -> Table:
    """Make the table of `generate --compare`, a column for each way, so that it fits a terminal."""
    cells = [{**row, "num_prompts": num_prompts} for row in rows]
    return Table.of("", COLUMNS, cells).transposed()
