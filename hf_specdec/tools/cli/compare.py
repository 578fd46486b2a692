"""`generate --compare`: a method next to plain `generate` and transformers' own, measured and shown as by `bench`."""

import copy
from collections.abc import Mapping
from typing import Any

import typer
from transformers import PreTrainedModel

from hf_specdec.engine.model_state import state_of
from hf_specdec.errors import ConfigError
from hf_specdec.tools.bench.header import make_header
from hf_specdec.tools.bench.loaded_model import LoadedModel
from hf_specdec.tools.bench.prompts import Prompt
from hf_specdec.tools.bench.records import Records
from hf_specdec.tools.bench.rows import ASSISTANT, LOOKUP, LOOKUP_NUM_TOKENS, Row, base_rows
from hf_specdec.tools.bench.run import BenchSettings, measure
from hf_specdec.tools.bench.table import check_pandas, has_speeds
from hf_specdec.tools.cli.bench import print_result
from hf_specdec.tools.cli.job import Job
from hf_specdec.tools.cli.report import note_interrupt, progress_bar
from hf_specdec.tools.command_errors import INTERRUPTED


def compare_and_print(job: Job, text: str | None, method: Mapping[str, Any], rounds: int, *, as_json: bool) -> None:
    """Continue a prompt, then print the table of the ways to continue it; Ctrl-C leaves what is measured.

    Args:
        method: arguments of `generate` that choose the method.

    Raises:
        ConfigError: there is no method.
        MissingExtraError: pandas is not installed.
        Exit: the method gave other tokens than it promises (1), or the run was interrupted (130).
    """
    check_pandas()
    if method["spec_method"] is None:
        raise ConfigError("compare", "must come with a method", "none", "Use --spec-method prompt_lookup.")
    job, texts = job.with_prompts(text)
    known = copy.deepcopy(state_of(job.model).method_state)  # without the answer, so that no call drafts from it
    if not as_json:
        job.write(texts[0], method, is_shown=text is None)
    settings = BenchSettings(seed=job.seed or 0, **job.options)
    before = () if job.system is None else ({"role": "system", "content": job.system},)
    prompts = [Prompt(f"prompt {number}", "prompts", text, job.is_chat, before) for number, text in enumerate(texts)]
    loaded = LoadedModel(job.model, job.tokenizer, str(job.model.config.name_or_path))
    records, rows = Records(make_header(loaded, settings)), _rows(method)
    is_complete = True
    try:
        with progress_bar() as progress:
            measure(loaded, prompts, rows, settings, records, rounds=rounds, progress=progress, method_state=known)
    except KeyboardInterrupt:
        is_complete = False
        if not has_speeds(records.records):
            raise
        note_interrupt()
    print_result(records.header, records.records, rows, as_json=as_json)
    if not is_complete:
        raise typer.Exit(INTERRUPTED)


def _rows(method: Mapping[str, Any]) -> list[Row]:
    """The method with its counterpart of transformers, next to the rows of every measurement."""
    config = method["spec_config"]
    ours = Row(str(method["spec_method"]), method, is_seed_exact=config.is_seed_exact)
    return [*base_rows(), _transformers_row(method), *([] if ours.name == "plain" else [ours])]


def _transformers_row(method: Mapping[str, Any]) -> Row:
    """transformers' counterpart of a method: assisted generation with its draft model, else prompt lookup."""
    if isinstance(method.get("assistant_model"), PreTrainedModel):
        names = ("assistant_model", "tokenizer", "assistant_tokenizer")
        drafts = {name: method[name] for name in names if name in method}
        return Row(ASSISTANT, drafts, is_transformers=True, is_seed_exact=False)
    num_tokens = getattr(method["spec_config"], "max_draft_len", LOOKUP_NUM_TOKENS)
    return Row(LOOKUP, {"prompt_lookup_num_tokens": num_tokens}, is_transformers=True, is_seed_exact=False)
