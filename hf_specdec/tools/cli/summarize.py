"""`hf-specdec summarize`: summaries by plain generation and by a method, their ROUGE scores and their speed."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from hf_specdec.errors import ConfigError
from hf_specdec.tools.cli import options
from hf_specdec.tools.cli.options import LoadOptions, MethodOptions, SamplingOptions
from hf_specdec.tools.cli.spread import spread
from hf_specdec.tools.command_errors import INTERRUPTED, note

PLAIN = "plain generate"
TOLERANCE = 0.5  # points of ROUGE-1


@dataclass(frozen=True, slots=True, kw_only=True)
class AccuracyOptions:
    """Thresholds of the summaries."""

    check_accuracy: Annotated[
        bool, typer.Option("--check-accuracy", help="Exit with 1 where the method's summaries fall below a threshold.")
    ] = False
    rouge1_threshold: Annotated[
        float | None,
        typer.Option(min=0, max=100, help="Least ROUGE-1 of the method. Default: plain's, less half a point."),
    ] = None
    equal_threshold: Annotated[
        float | None,
        typer.Option(
            min=0,
            max=1,
            help="Least share of summaries with plain's tokens. Default: 1 where the method promises it, in fp32; "
            "else 0.",
        ),
    ] = None

    def __post_init__(self) -> None:
        for name in ("rouge1_threshold", "equal_threshold"):
            if (value := getattr(self, name)) is not None and not self.check_accuracy:
                raise ConfigError(name, "must come with check_accuracy", value, "Add --check-accuracy.")

    def missed(self, rows: list[dict[str, Any]], least_equal: float) -> list[str]:
        """The thresholds that the method's row misses, in words; `least_equal` is the default of `equal_threshold`."""
        plain, method = rows
        least_rouge1 = plain["rouge1"] - TOLERANCE if self.rouge1_threshold is None else self.rouge1_threshold
        least_equal = least_equal if self.equal_threshold is None else self.equal_threshold
        num_equal, num_articles = method["num_equal_to_plain"], len(method["summaries"])
        missed = []
        if method["rouge1"] < least_rouge1:
            missed.append(f"ROUGE-1 is {method['rouge1']:.2f}, below {least_rouge1:.2f}")
        if num_equal / num_articles < least_equal:
            missed.append(f"{num_equal} of {num_articles} summaries are equal, below {least_equal:.0%}")
        return missed


@spread
def summarize(
    *,
    loading: LoadOptions,
    articles: Annotated[
        Path | None,
        typer.Option(
            help="A .jsonl file (.gz too) whose lines have `article` and `highlights`, as in CNN/DailyMail. Default: "
            "twelve short articles that ship with the package."
        ),
    ] = None,
    limit: Annotated[int | None, typer.Option(min=1, help="Most articles.")] = None,
    max_input_tokens: Annotated[
        int, typer.Option(min=1, help="Most tokens of an article; the rest of it is left out.")
    ] = 1024,
    prompt_template: Annotated[
        str | None,
        typer.Option(
            help="The prompt of an article, with {article} in it. Default: a request through the chat template, if "
            "there is one; else the article and 'TL;DR:'."
        ),
    ] = None,
    accuracy: AccuracyOptions,
    method: MethodOptions,
    max_new_tokens: options.MaxNewTokens = 100,
    sampling: SamplingOptions,
    seed: options.Seed = 0,
    json: options.Json = False,
) -> None:
    """Summarise articles plainly and with a method: ROUGE scores and tokens a second of both.

    With --check-accuracy the exit code is 1 where the method's ROUGE-1 or its equality with plain is below a threshold.
    An interrupt leaves the articles that are complete; the exit code is 130.
    """
    if method.spec_method == "none":
        rule = "must be a method"
        raise ConfigError("spec_method", rule, "none", "Plain generation runs next to every method.")
    kwargs = {"max_new_tokens": max_new_tokens, **sampling.kwargs}

    import torch

    from hf_specdec.kernels.quantization.weights import precision_of
    from hf_specdec.tools.cli.models import load, remembering
    from hf_specdec.tools.cli.report import near_tie_note, note_interrupt, print_json, print_rows
    from hf_specdec.tools.summarize.run import Summarizer, check_rouge, read_articles, score_rows, summarize_all

    check_rouge()
    texts = read_articles(articles, limit=limit)
    target = load(loading, method)
    summarizer = Summarizer(target.model, target.tokenizer, kwargs, seed or 0, max_input_tokens, prompt_template)
    with remembering(target.model, method.spec_memory):
        ways = {PLAIN: {"spec_method": None}, target.kwargs["spec_method"]: target.kwargs}
        rows = score_rows(summarize_all(summarizer, texts, ways), texts)
    num_articles, precision = len(rows[0]["summaries"]), precision_of(target.model)
    setting = {"model": target.name, "dtype": precision, "threads": torch.get_num_threads(), "options": kwargs}
    if num_articles < len(texts):
        note_interrupt()
    if json:
        print_json({**setting, "rows": rows, "is_complete": num_articles == len(texts)})
    else:
        print_rows([{name: value for name, value in row.items() if name != "summaries"} for row in rows], setting)
    if rows[-1]["num_equal_to_plain"] < num_articles and precision != "float32":
        near_tie_note(precision)
    if num_articles < len(texts):
        raise typer.Exit(INTERRUPTED)
    if accuracy.check_accuracy:
        follows_seed = target.kwargs["spec_config"].is_seed_exact or not sampling.do_sample
        missed = accuracy.missed(rows, float(follows_seed and precision == "float32"))
        for message in missed:
            note(f"error: {message}", "red")
        if missed:
            raise typer.Exit(1)
