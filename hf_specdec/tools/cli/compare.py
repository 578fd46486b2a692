"""`generate --compare`: a method next to plain `generate` and transformers' own, measured and shown as by `bench`."""

import copy
from collections.abc import Sequence

import typer

from hf_specdec.engine.model_state import state_of
from hf_specdec.errors import ConfigError
from hf_specdec.tools.bench.header import make_header
from hf_specdec.tools.bench.prompts import Prompt
from hf_specdec.tools.bench.records import Records
from hf_specdec.tools.bench.rows import ASSISTANT, LOOKUP, LOOKUP_NUM_TOKENS, Row, base_rows
from hf_specdec.tools.bench.run import BenchSettings
from hf_specdec.tools.bench.table import check_pandas
from hf_specdec.tools.cli.job import Job
from hf_specdec.tools.cli.measured import measure_and_print


def compare_and_print(job: Job, prompts: Sequence[Prompt], rounds: int, *, as_json: bool) -> None:
    """Continue a prompt, then print the table of the ways to continue it."""
    check_pandas()
    if job.method["spec_method"] is None:
        raise ConfigError("compare", "must come with a method", "none", "Use --spec-method prompt_lookup.")
    state = copy.deepcopy(state_of(job.loaded.model).method_state)  # so that no call drafts from the answer
    if not as_json:
        job.write(prompts[0])
        typer.echo()
    settings = BenchSettings(seed=job.seed or 0, **job.options)
    records = Records(make_header(job.loaded, settings))
    printing, kwargs = {"as_json": as_json}, {"rounds": rounds, "method_state": state}
    measure_and_print(job.loaded, prompts, _rows(job), settings, records, printing, **kwargs)


def _rows(job: Job) -> list[Row]:
    """The method with its counterpart of transformers, next to the rows of every measurement."""
    method, config = job.method, job.method["spec_config"]
    ours = Row(str(method["spec_method"]), method, is_seed_exact=config.is_seed_exact)
    if job.loaded.draft_model is not None:
        name, kwargs = ASSISTANT, job.loaded.assistant_kwargs("draft_model")
    else:
        name, kwargs = LOOKUP, {"prompt_lookup_num_tokens": getattr(config, "max_draft_len", LOOKUP_NUM_TOKENS)}
    theirs = Row(name, kwargs, is_transformers=True, is_seed_exact=False)
    return [*base_rows(), theirs, *([] if ours.name == "plain" else [ours])]
