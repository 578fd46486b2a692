"""`hf-specdec summarize`: summaries by plain generation and by a method, their ROUGE scores and their speed."""

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.table import Table

from hf_specdec.cli import options
from hf_specdec.cli.inputs import check_seed, load, load_draft, read_sampling, set_threads
from hf_specdec.cli.memory import open_memory, remembering
from hf_specdec.cli.method import DRAFT_METHODS, check_draft_options, read_method
from hf_specdec.cli.report import note, print_json, reports_errors, stdout_console
from hf_specdec.cli.where import read_where
from hf_specdec.errors import ConfigError
from hf_specdec.methods.config import SpecConfig
from hf_specdec.quantization.report import precision_of
from hf_specdec.summarization.articles import Article, load_articles, read_articles
from hf_specdec.summarization.rouge import Rouge, check_rouge, score
from hf_specdec.summarization.run import Summaries, Summarizer, summarize_all

__all__ = ["summarize"]

PLAIN = "plain generate"
TOLERANCE = 0.5  # points of ROUGE-1

ArticlesFile = Annotated[
    Path | None,
    typer.Option(
        "--articles",
        help="A .jsonl file (.gz too) whose lines have `article` and `highlights`. Default: twelve short articles "
        "that ship with the package.",
    ),
]
DatasetName = Annotated[
    str | None,
    typer.Option("--dataset", help="A data set for `datasets` to load: abisee/cnn_dailymail:3.0.0:test."),
]
Limit = Annotated[int | None, typer.Option("--limit", min=1, help="Most articles.")]
ArticlesAtOnce = Annotated[int, typer.Option("--batch-size", min=1, help="Articles in one call of generate.")]
MaxInputTokens = Annotated[
    int, typer.Option("--max-input-tokens", min=1, help="Most tokens of an article; the rest of it is left out.")
]
PromptTemplate = Annotated[
    str | None,
    typer.Option(
        "--prompt-template",
        help="The prompt, with {article} in it. Default: a request through the chat template, if there is one; else "
        "the article and 'TL;DR:'.",
    ),
]
CheckAccuracy = Annotated[
    bool, typer.Option("--check-accuracy", help="Exit with 1 where the method's summaries fall past a threshold.")
]
Rouge1Threshold = Annotated[
    float | None,
    typer.Option(
        "--rouge1-threshold", min=0, max=100, help="Least ROUGE-1 of the method. Default: plain's, less half a point."
    ),
]
EqualThreshold = Annotated[
    float | None,
    typer.Option(
        "--equal-threshold",
        min=0,
        max=1,
        help="Least share of summaries with plain's tokens. Default: 1 where the method promises it, in fp32; else 0.",
    ),
]


@reports_errors
def summarize(
    model: options.ModelPath = None,
    articles: ArticlesFile = None,
    dataset: DatasetName = None,
    limit: Limit = None,
    batch_size: ArticlesAtOnce = 1,
    max_input_tokens: MaxInputTokens = 1024,
    prompt_template: PromptTemplate = None,
    check_accuracy: CheckAccuracy = False,
    rouge1_threshold: Rouge1Threshold = None,
    equal_threshold: EqualThreshold = None,
    spec_method: options.SpecMethod = None,
    prompt_lookup_config: options.PromptLookup = None,
    lookahead_config: options.LookaheadList = None,
    draft_model_config: options.DraftModelList = None,
    auto_config: options.AutoConfig = None,
    spec_config: options.SpecConfigText = None,
    draft_model: options.DraftModelPath = None,
    engine: options.EngineName = None,
    spec_memory: options.SpecMemoryFile = None,
    max_new_tokens: options.MaxNewTokens = 100,
    do_sample: options.DoSample = False,
    temperature: options.Temperature = None,
    top_p: options.TopP = None,
    top_k: options.TopK = None,
    seed: options.Seed = 0,
    dtype: options.Dtype = "auto",
    draft_dtype: options.DraftDtype = None,
    attn_implementation: options.AttnImplementation = None,
    threads: options.Threads = None,
    device_map: options.DeviceMap = None,
    max_memory: options.MaxMemory = None,
    offload_folder: options.OffloadFolder = None,
    json: options.Json = False,
) -> None:
    """Summarise articles plainly and with a method: ROUGE scores and tokens a second of both.

    With --check-accuracy the exit code is 1 where the method's ROUGE-1 or its equality with plain is below a threshold.
    """
    forms = {"prompt_lookup_config": prompt_lookup_config, "lookahead_config": lookahead_config}
    forms |= {"draft_model_config": draft_model_config, "auto_config": auto_config}
    given = {"spec_config": spec_config, "engine": engine, "draft_model": draft_model}
    method, config = _method(read_method(spec_method, list_forms=forms, memory=spec_memory, **given))
    check_draft_options(method, model=model, draft_model=draft_model, draft_dtype=draft_dtype)
    sampling = read_sampling(do_sample, temperature=temperature, top_p=top_p, top_k=top_k)
    check_seed(seed)
    texts, kept = _read(articles, dataset, limit), open_memory(spec_memory)
    set_threads(model, threads)
    place: dict[str, Any] = {"device_map": device_map, "max_memory": max_memory, "offload_folder": offload_folder}
    where = read_where(**place, tensor_parallel=False, config=config)
    loaded, tokenizer = load(model, dtype, config, where, attn_implementation=attn_implementation)
    how: dict[str, Any] = {"spec_method": method, "spec_config": config}
    if method in DRAFT_METHODS or draft_model is not None:
        beside = where.beside(loaded)
        how["assistant_model"] = load_draft(draft_model, draft_dtype or dtype, config, beside, method=method)
    shared = {"max_new_tokens": max_new_tokens, **sampling}
    summarizer = Summarizer(loaded, tokenizer, shared, seed, batch_size, max_input_tokens, prompt_template)
    with remembering(loaded, kept):
        accuracy = _measure(summarizer, texts, {PLAIN: {}, method: how}, json)
    if check_accuracy:
        least_equal = _least_equal(summarizer, config) if equal_threshold is None else equal_threshold
        accuracy.check(rouge1_threshold, least_equal)


@dataclasses.dataclass(frozen=True, slots=True)
class _Accuracy:
    """How the method's summaries compare with plain generation's."""

    plain: Rouge
    method: Rouge
    num_equal: int
    num_articles: int

    def check(self, least_rouge1: float | None, least_equal: float) -> None:
        """Exit with 1 where a threshold is missed; without one, ROUGE-1 may be half a point below plain's."""
        least_rouge1 = self.plain.rouge1 - TOLERANCE if least_rouge1 is None else least_rouge1
        share = self.num_equal / self.num_articles
        missed = []
        if self.method.rouge1 < least_rouge1:
            missed.append(f"ROUGE-1 is {self.method.rouge1:.2f}, below {least_rouge1:.2f}")
        if share < least_equal:
            missed.append(f"{self.num_equal} of {self.num_articles} summaries are equal, below {least_equal:.0%}")
        for message in missed:
            note(f"error: {message}", "red")
        if missed:
            raise typer.Exit(1)


def _method(read: tuple[str | None, SpecConfig | None]) -> tuple[str, SpecConfig]:
    """A method to set beside plain generation."""
    method, config = read
    if method is None or config is None:
        raise ConfigError("--spec-method", "must be a method", "none", "Plain generation runs beside every one.")
    return method, config


def _least_equal(summarizer: Summarizer, config: SpecConfig) -> float:
    """1 where the method promises plain generation's tokens, else 0: in half precision a near-tie may flip."""
    follows_seed = not summarizer.options["do_sample"] or (config.is_seed_exact and summarizer.batch_size == 1)
    return float(follows_seed and precision_of(summarizer.model) == "float32")


def _measure(
    summarizer: Summarizer, articles: list[Article], ways: Mapping[str, Mapping[str, Any]], as_json: bool
) -> _Accuracy:
    written = summarize_all(summarizer, articles, ways)
    plain, method = written.values()
    accuracy = _accuracy(plain, method, articles)
    _report(summarizer, written, accuracy, as_json)
    return accuracy


def _accuracy(plain: Summaries, method: Summaries, articles: list[Article]) -> _Accuracy:
    references = [article.reference for article in articles]
    scores = score(plain.texts, references), score(method.texts, references)
    return _Accuracy(*scores, method.num_equal(plain), len(articles))


def _read(articles: Path | None, dataset: str | None, limit: int | None) -> list[Article]:
    check_rouge()
    if dataset is None:
        return read_articles(articles, limit=limit)
    if articles is not None:
        raise ConfigError("--dataset", "must be left out with --articles", dataset, "Give only one of the two.")
    return load_articles(dataset, limit=limit)


def _report(summarizer: Summarizer, written: Mapping[str, Summaries], accuracy: _Accuracy, as_json: bool) -> None:
    model = summarizer.model
    setting = {"model": model.config.name_or_path, "dtype": precision_of(model), "threads": torch.get_num_threads()}
    setting |= {"num_articles": accuracy.num_articles, "batch_size": summarizer.batch_size}
    equal = [accuracy.num_articles, accuracy.num_equal]
    rows: list[dict[str, Any]] = [
        {
            "name": name,
            **dataclasses.asdict(rouge),
            "num_tokens": summaries.num_tokens,
            "tokens_per_second": summaries.tokens_per_second,
            "num_equal_to_plain": num_equal,
            "summaries": summaries.texts,
        }
        for (name, summaries), rouge, num_equal in zip(
            written.items(), (accuracy.plain, accuracy.method), equal, strict=True
        )
    ]
    if as_json:
        options = {**summarizer.options, "seed": summarizer.seed}
        print_json({**setting, "options": options, "rows": rows})
        return
    table = Table(caption=", ".join(f"{name} {value}" for name, value in setting.items()), caption_justify="left")
    table.add_column("")
    for heading in ("ROUGE-1", "ROUGE-2", "ROUGE-L", "ROUGE-Lsum", "tokens", "tokens/s", "equal to\nplain"):
        table.add_column(heading, justify="right")
    for row in rows:
        scores = (f"{row[kind]:.2f}" for kind in ("rouge1", "rouge2", "rougeL", "rougeLsum"))
        speed = f"{row['tokens_per_second']:.1f}"
        equality = f"{row['num_equal_to_plain']} of {accuracy.num_articles}"
        table.add_row(row["name"], *scores, str(row["num_tokens"]), speed, equality)
    stdout_console().print(table)
