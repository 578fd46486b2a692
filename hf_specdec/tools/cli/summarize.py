"""`hf-specdec summarize`: summaries by plain generation and by a method, their ROUGE scores and their speed."""

from pathlib import Path
from typing import Annotated

import typer

from hf_specdec.errors import ConfigError
from hf_specdec.tools.cli import options
from hf_specdec.tools.cli.options import LoadOptions, MethodOptions, SamplingOptions
from hf_specdec.tools.cli.spread import spread
from hf_specdec.tools.command_errors import note

PLAIN = "plain generate"
TOLERANCE = 0.5  # points of ROUGE-1


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
    check_accuracy: Annotated[
        bool, typer.Option("--check-accuracy", help="Exit with 1 where the method's summaries fall below a threshold.")
    ] = False,
    rouge1_threshold: Annotated[
        float | None,
        typer.Option(min=0, max=100, help="Least ROUGE-1 of the method. Default: plain's, less half a point."),
    ] = None,
    equal_threshold: Annotated[
        float | None,
        typer.Option(
            min=0,
            max=1,
            help="Least share of summaries with plain's tokens. Default: 1 where the method promises it, in fp32; "
            "else 0.",
        ),
    ] = None,
    method: MethodOptions,
    max_new_tokens: options.MaxNewTokens = 100,
    sampling: SamplingOptions,
    seed: options.Seed = 0,
    json: options.Json = False,
) -> None:
    """Summarise articles plainly and with a method: ROUGE scores and tokens a second of both.

    With --check-accuracy the exit code is 1 where the method's ROUGE-1 or its equality with plain is below a threshold.
    """
    if method.spec_method == "none":
        rule, remedy = "must be a method", "Plain generation runs next to every method."
        raise ConfigError("spec_method", rule, "none", remedy)
    for name, value in {"rouge1_threshold": rouge1_threshold, "equal_threshold": equal_threshold}.items():
        if value is not None and not check_accuracy:
            raise ConfigError(name, "must come with check_accuracy", value, "Add --check-accuracy.")
    kwargs = {"max_new_tokens": max_new_tokens, **sampling.kwargs}

    from hf_specdec.kernels.quantization.weights import precision_of
    from hf_specdec.tools.cli.models import load, remembering
    from hf_specdec.tools.cli.report import print_json, print_rows
    from hf_specdec.tools.summarize.run import Summarizer, check_rouge, read_articles, score_rows, summarize_all

    check_rouge()
    texts = read_articles(articles, limit=limit)
    target = load(loading, method)
    summarizer = Summarizer(target.model, target.tokenizer, kwargs, seed or 0, max_input_tokens, prompt_template)
    with remembering(target.model, method.spec_memory):
        ways = {PLAIN: {"spec_method": None}, target.kwargs["spec_method"]: target.kwargs}
        rows = score_rows(summarize_all(summarizer, texts, ways), texts)
    setting = {"model": target.name, "dtype": precision_of(target.model), "num_articles": len(texts), "options": kwargs}
    if json:
        print_json({**setting, "rows": rows})
    else:
        print_rows([{name: value for name, value in row.items() if name != "summaries"} for row in rows], setting)
    if not check_accuracy:
        return
    plain, found = rows
    follows_seed = target.kwargs["spec_config"].is_seed_exact or not sampling.do_sample
    least_equal = float(follows_seed and setting["dtype"] == "float32") if equal_threshold is None else equal_threshold
    checks = {
        "rouge1": (found["rouge1"], plain["rouge1"] - TOLERANCE if rouge1_threshold is None else rouge1_threshold),
        "share of equal summaries": (found["num_equal_to_plain"] / len(texts), least_equal),
    }
    missed = [f"{name} is {value:.2f}, below {least:.2f}" for name, (value, least) in checks.items() if value < least]
    for message in missed:
        note(f"error: {message}", "red")
    if missed:
        raise typer.Exit(1)
