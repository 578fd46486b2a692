"""`hf-specdec summarize`: summaries by plain generation and by a method, their ROUGE scores and their speed."""

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

from hf_specdec.errors import ConfigError
from hf_specdec.kernels.quantization.weights import precision_of
from hf_specdec.methods.common.config import SpecConfig
from hf_specdec.tools.bench.table import Table
from hf_specdec.tools.cli import options
from hf_specdec.tools.cli.inputs import check_seed
from hf_specdec.tools.cli.memory import open_memory, remembering
from hf_specdec.tools.cli.options import LoadOptions, MethodOptions, SamplingOptions
from hf_specdec.tools.cli.report import near_tie_note, note_interrupt, print_json, print_table
from hf_specdec.tools.cli.spread import spread
from hf_specdec.tools.command_errors import INTERRUPTED, note
from hf_specdec.tools.summarize.articles import Article, load_articles, read_articles
from hf_specdec.tools.summarize.rouge import check_rouge, score
from hf_specdec.tools.summarize.run import Summarizer, summarize_all

PLAIN = "plain generate"
TOLERANCE = 0.5  # points of ROUGE-1
COLUMNS = {
    "": "{name}",
    "ROUGE-1": "{rouge1:.2f}",
    "ROUGE-2": "{rouge2:.2f}",
    "ROUGE-L": "{rougeL:.2f}",
    "ROUGE-Lsum": "{rougeLsum:.2f}",
    "tokens": "{num_tokens}",
    "tokens/s": "{tokens_per_second:.1f}",
    "equal to plain": "{num_equal_to_plain} of {num_articles}",
}


@dataclasses.dataclass(frozen=True, slots=True)
class ArticleOptions:
    """Articles to summarise."""

    articles: Annotated[
        Path | None,
        typer.Option(
            help="A .jsonl file (.gz too) whose lines have `article` and `highlights`, or are chats with answers. "
            "Default: twelve short articles that ship with the package."
        ),
    ] = None
    dataset: Annotated[
        str | None, typer.Option(help="A data set for `datasets` to load: abisee/cnn_dailymail:3.0.0:test.")
    ] = None
    limit: Annotated[int | None, typer.Option(min=1, help="Most articles.")] = None

    def read(self) -> list[Article]:
        """The articles, once it is known that they can be scored."""
        check_rouge()
        if self.dataset is None:
            return read_articles(self.articles, limit=self.limit)
        if self.articles is not None:
            remedy = "Give only one of the two."
            raise ConfigError("--dataset", "must be left out with --articles", self.dataset, remedy)
        return load_articles(self.dataset, limit=self.limit)


@dataclasses.dataclass(frozen=True, slots=True)
class AccuracyOptions:
    """Thresholds of the summaries."""

    check_accuracy: Annotated[
        bool, typer.Option("--check-accuracy", help="Exit with 1 where the method's summaries fall past a threshold.")
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
        thresholds = {"--rouge1-threshold": self.rouge1_threshold, "--equal-threshold": self.equal_threshold}
        for field, value in thresholds.items():
            if value is not None and not self.check_accuracy:
                raise ConfigError(field, "must be left out without --check-accuracy", value, "Add --check-accuracy.")


@dataclasses.dataclass(frozen=True, slots=True)
class PromptOptions:
    """Prompts made of the articles."""

    batch_size: Annotated[int, typer.Option(min=1, help="Articles in one call of generate.")] = 1
    max_input_tokens: Annotated[
        int,
        typer.Option(
            min=1,
            help="Most tokens of an article; the rest of it is left out, as is what the model has no positions for.",
        ),
    ] = 1024
    prompt_template: Annotated[
        str | None,
        typer.Option(
            help="The prompt of an article, with {article} in it. Default: a request through the chat template, if "
            "there is one; else the article and 'TL;DR:'."
        ),
    ] = None


@spread
def summarize(
    *,
    model: options.ModelPath = None,
    articles: ArticleOptions,
    prompts: PromptOptions,
    accuracy: AccuracyOptions,
    choice: MethodOptions,
    engine: options.EngineName = None,
    spec_memory: options.SpecMemoryFile = None,
    max_new_tokens: options.MaxNewTokens = 100,
    sampling: SamplingOptions,
    seed: options.Seed = 0,
    dtype: options.Dtype = "auto",
    loading: LoadOptions,
    json: options.Json = False,
) -> None:
    """Summarise articles plainly and with a method: ROUGE scores and tokens a second of both.

    With --check-accuracy the exit code is 1 where the method's ROUGE-1 or its equality with plain is below a threshold.
    An interrupt leaves the articles that are complete; the exit code is 130.
    """
    method, config = choice.read(model, engine=engine, memory=spec_memory)
    if method is None or config is None:
        raise ConfigError("--spec-method", "must be a method", "none", "Plain generation runs next to every one.")
    drawn = sampling.read()
    check_seed(seed)
    texts, kept = articles.read(), open_memory(spec_memory)
    target = loading.load(model, dtype, config)
    how = choice.arguments(method, config, dtype, target)
    shared = {"max_new_tokens": max_new_tokens, **drawn}
    summarizer = Summarizer(
        target.model,
        target.tokenizer,
        shared,
        seed,
        prompts.batch_size,
        prompts.max_input_tokens,
        prompts.prompt_template,
    )
    with remembering(target.model, kept):
        rows = _measured(summarizer, texts, {PLAIN: {}, method: how})
    num_articles = len(rows[0]["summaries"])
    is_complete = num_articles == len(texts)
    if not is_complete:
        note_interrupt()
    if json:
        options_used = {"options": {**shared, "seed": seed}}
        print_json({**_setting(summarizer, num_articles), **options_used, "rows": rows, "is_complete": is_complete})
    else:
        _print_scores(summarizer, rows, num_articles)
    precision = precision_of(target.model)
    if rows[-1]["num_equal_to_plain"] < num_articles and precision != "float32":
        near_tie_note(precision)
    if not is_complete:
        raise typer.Exit(INTERRUPTED)
    if accuracy.check_accuracy:
        _check(rows, num_articles, accuracy, _least_equal(summarizer, config))


def _measured(
    summarizer: Summarizer, articles: list[Article], ways: Mapping[str, Mapping[str, Any]]
) -> list[dict[str, Any]]:
    """Scores and speed of each way, plain generation first, as JSON values."""
    written = summarize_all(summarizer, articles, ways)
    plain = written[PLAIN]
    references = [article.reference for article in articles[: len(plain.texts)]]
    return [
        {
            "name": name,
            **score(summaries.texts, references),
            "num_tokens": summaries.num_tokens,
            "tokens_per_second": summaries.tokens_per_second,
            "num_equal_to_plain": len(references) if summaries is plain else summaries.num_equal(plain),
            "summaries": summaries.texts,
        }
        for name, summaries in written.items()
    ]


def _setting(summarizer: Summarizer, num_articles: int) -> dict[str, Any]:
    return {
        "model": summarizer.model.config.name_or_path,
        "dtype": precision_of(summarizer.model),
        "threads": torch.get_num_threads(),
        "num_articles": num_articles,
        "batch_size": summarizer.batch_size,
    }


def _print_scores(summarizer: Summarizer, rows: list[dict[str, Any]], num_articles: int) -> None:
    setting = _setting(summarizer, num_articles)
    table = Table.of("", COLUMNS, [{**row, "num_articles": num_articles} for row in rows])
    print_table(table, ", ".join(f"{name} {value}" for name, value in setting.items()))


def _check(rows: list[dict[str, Any]], num_articles: int, accuracy: AccuracyOptions, least_equal: float) -> None:
    """Exit with 1 where a threshold is missed; without one, ROUGE-1 may be half a point below plain's."""
    plain, method = rows
    least_rouge1 = accuracy.rouge1_threshold
    least_rouge1 = plain["rouge1"] - TOLERANCE if least_rouge1 is None else least_rouge1
    least_equal = least_equal if accuracy.equal_threshold is None else accuracy.equal_threshold
    num_equal, missed = method["num_equal_to_plain"], []
    if method["rouge1"] < least_rouge1:
        missed.append(f"ROUGE-1 is {method['rouge1']:.2f}, below {least_rouge1:.2f}")
    if num_equal / num_articles < least_equal:
        missed.append(f"{num_equal} of {num_articles} summaries are equal, below {least_equal:.0%}")
    for message in missed:
        note(f"error: {message}", "red")
    if missed:
        raise typer.Exit(1)


def _least_equal(summarizer: Summarizer, config: SpecConfig) -> float:
    """1 where the method promises plain generation's tokens, else 0: in half precision a near-tie may flip."""
    follows_seed = not summarizer.options["do_sample"] or (config.is_seed_exact and summarizer.batch_size == 1)
    return float(follows_seed and precision_of(summarizer.model) == "float32")
