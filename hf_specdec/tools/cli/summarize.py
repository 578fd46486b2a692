"""`hf-specdec summarize`: summaries by plain generation and by a method, their ROUGE scores and their speed."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from hf_specdec.errors import ConfigError
from hf_specdec.tools.cli import options
from hf_specdec.tools.cli.options import LoadOptions, MethodOptions, SamplingOptions
from hf_specdec.tools.cli.spread import spread
from hf_specdec.tools.command_errors import note

PLAIN = "plain generate"
TOLERANCE = 0.5  # points of ROUGE-1


@dataclass(frozen=True, slots=True, kw_only=True)
class SummaryOptions:
    """Articles, and a check of the summaries.

    Attributes:
        articles (`Path`): A .jsonl file (.gz too) whose lines have `article` and `highlights`, as in CNN/DailyMail.
            Default: twelve short articles that ship with the package.
        limit (`int`): Most articles.
        max_input_tokens (`int`): Most tokens of an article; the rest of it is left out.
        check_accuracy (`bool`): Exit with 1 where the method's summaries fall below a threshold.
        rouge1_threshold (`float`): Least ROUGE-1 of the method. Default: plain's, less half a point.
    """

    articles: Path | None = None
    limit: options.AtLeastOne = None
    max_input_tokens: Annotated[int, typer.Option(min=1)] = 1024
    check_accuracy: bool = False
    rouge1_threshold: Annotated[float | None, typer.Option(min=0, max=100)] = None


@spread
def summarize(
    *,
    loading: LoadOptions,
    summary: SummaryOptions,
    method: MethodOptions,
    max_new_tokens: options.MaxNewTokens = 100,
    sampling: SamplingOptions,
    seed: options.Seed = 0,
    json: options.Json = False,
) -> None:
    """Summarise articles plainly and with a method: ROUGE scores and tokens a second of both.

    With --check-accuracy the exit code is 1 where the method's ROUGE-1 is below the threshold, or where a summary in
    fp32 is not plain's.
    """
    if method.spec_method == "none":
        rule, remedy = "must be a method", "Plain generation runs next to every method."
        raise ConfigError("spec_method", rule, "none", remedy)
    if (threshold := summary.rouge1_threshold) is not None and not summary.check_accuracy:
        raise ConfigError("rouge1_threshold", "must come with check_accuracy", threshold, "Add it.")
    kwargs = {"max_new_tokens": max_new_tokens, **sampling.kwargs}

    from hf_specdec.kernels.quantization.weights import precision_of
    from hf_specdec.tools.bench.table import check_pandas, show
    from hf_specdec.tools.cli.models import load
    from hf_specdec.tools.cli.report import print_json
    from hf_specdec.tools.summarize.run import Summarizer, check_rouge, read_articles, score_rows, summarize_all

    check_rouge()
    texts, pandas = read_articles(summary.articles, limit=summary.limit), check_pandas()
    loaded, ours = load(loading, method)
    summarizer = Summarizer(loaded.model, loaded.tokenizer, kwargs, seed or 0, summary.max_input_tokens)
    ways = {PLAIN: {"spec_method": None}, ours["spec_method"]: ours}
    rows = score_rows(summarize_all(summarizer, texts, ways), texts)
    dtype = precision_of(loaded.model)
    if json:
        setting = {"model": loaded.name, "dtype": dtype, "num_articles": len(texts), "options": kwargs}
        print_json({**setting, "rows": rows})
    else:
        table = pandas.DataFrame(rows).drop(columns="summaries").set_index("name").rename_axis(index=None)
        typer.echo(f"{show(table)}\n\nmodel {loaded.name}, dtype {dtype}, {len(texts)} articles, options {kwargs}")
    if summary.check_accuracy:
        follows_seed = ours["spec_config"].is_seed_exact or not sampling.do_sample
        _check(rows, threshold, float(follows_seed and dtype == "float32"))


def _check(rows: Sequence[Mapping[str, Any]], rouge1: float | None, equal_share: float) -> None:
    """Report what is below its threshold, and exit with 1; no `rouge1` is plain's, less the tolerance."""
    plain, ours = rows
    least_rouge1 = plain["rouge1"] - TOLERANCE if rouge1 is None else rouge1
    share = ours["num_equal_to_plain"] / len(ours["summaries"])
    figures = {"rouge1": (ours["rouge1"], least_rouge1), "share of equal summaries": (share, equal_share)}
    missed = [f"{name} is {value:.2f}, below {least:.2f}" for name, (value, least) in figures.items() if value < least]
    for message in missed:
        note(f"error: {message}", "red")
    if missed:
        raise typer.Exit(1)
