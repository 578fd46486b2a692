"""The options of `hf-specdec bench` but for its models, with their help."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from hf_specdec.common.files import check_room
from hf_specdec.errors import ConfigError
from hf_specdec.methods.common.config import check_temperature
from hf_specdec.methods.registry import METHODS, config_arguments
from hf_specdec.tools.bench.document import check_document_file
from hf_specdec.tools.bench.plan import BenchSettings
from hf_specdec.tools.bench.plots import check_matplotlib
from hf_specdec.tools.bench.prompts import Prompt, batched, load_prompts, random_prompts
from hf_specdec.tools.cli import options
from hf_specdec.tools.command_errors import within

MODES = {None: ("greedy", "sampled"), True: ("sampled",), False: ("greedy",)}  # by --do-sample


@dataclass(frozen=True, slots=True)
class PromptOptions:
    """Prompts to measure."""

    prompts: Annotated[
        list[str] | None, typer.Option(help="File or folder of prompts; repeat for more. Default: the built-in set.")
    ] = None
    limit: Annotated[int | None, typer.Option(min=1, help="Most prompts, taken from the tasks in turn.")] = None
    random_tokens: Annotated[
        str | None,
        typer.Option(
            help="COUNTxLENGTH: also COUNT prompts of LENGTH random tokens, a task of their own; for example 8x64."
        ),
    ] = None
    batch_size: Annotated[
        list[int] | None,
        typer.Option(
            min=1,
            help="Prompts decoded together, first turns only; repeat for more, each a task of its own, and 1 every "
            "prompt in its own. Default: 1, all turns.",
        ),
    ] = None

    def load(self) -> list[Prompt]:
        """The prompts, one by one."""
        found = load_prompts(self.prompts or (), limit=self.limit)
        return found + self._random()

    def load_batched(self) -> list[Prompt]:
        """The prompts, in batches where those are asked for."""
        return self.load() if self.batch_size is None else batched(self.load(), self.batch_size)

    def _random(self) -> list[Prompt]:
        if self.random_tokens is None:
            return []
        count, _, length = self.random_tokens.partition("x")
        if not (count.isdecimal() and length.isdecimal()):
            raise ConfigError("random_tokens", "must be COUNTxLENGTH", self.random_tokens, "For example 8x64.")
        return random_prompts(int(count), length=int(length))


@dataclass(frozen=True, slots=True)
class RunOptions:
    """Rows to run, and how often."""

    row: Annotated[
        list[str] | None,
        typer.Option(
            help=f"What to measure next to generate: a method ({', '.join(METHODS)}), a method with its configuration "
            "(prompt_lookup:num_branches=4), auto+draft_model, auto+head, transformers:prompt_lookup, "
            "transformers:assistant, transformers:static, module:Class, or "
            "default for all there are. Repeat for more. Default: default."
        ),
    ] = None
    prompt_lookup_config: options.PromptLookupForm = None
    lookahead_config: options.LookaheadForm = None
    draft_model_config: options.DraftModelForm = None
    against: Annotated[
        list[str] | None,
        typer.Option(help="A row that the others are compared with, next to generate; repeat for more."),
    ] = None
    by_cpu_time: Annotated[
        bool,
        typer.Option("--by-cpu-time", help="Speeds of processor time, for a machine that other programs use too."),
    ] = False
    max_new_tokens: options.MaxNewTokens = 128
    rounds: Annotated[int, typer.Option(min=1, help="Timed rounds, after one that warms up.")] = 3
    do_sample: Annotated[
        bool | None,
        typer.Option("--do-sample/--no-do-sample", help="Sampled rows only, or greedy rows only. Default: both."),
    ] = None
    temperature: Annotated[float, typer.Option(help="Of the sampled rows.")] = 0.7
    seed: Annotated[int, typer.Option(help="Of the sampled rows: round r draws from seed + r.")] = 0

    def check(self) -> None:
        """Raise, before a model is loaded, for what a row would say in its own words."""
        check_temperature("--temperature", self.temperature, "--no-do-sample measures greedy rows alone.")
        for name, form in self._forms.items():
            with within(name):
                config_arguments()[name].config_class.parse(form, name)

    @property
    def rows(self) -> list[str]:
        """Rows that `--row` names, and one for each list form."""
        methods = config_arguments()
        return [
            *(self.row or ()),
            *(f"{methods[name].name}={form}" for name, form in self._forms.items()),
        ]

    @property
    def _forms(self) -> dict[str, str]:
        names = ("prompt_lookup_config", "lookahead_config", "draft_model_config")
        return {name: form for name in names if (form := getattr(self, name)) is not None}

    def settings(self) -> BenchSettings:
        """The same, checked."""
        return BenchSettings(
            max_new_tokens=self.max_new_tokens,
            rounds=self.rounds,
            modes=MODES[self.do_sample],
            temperature=self.temperature,
            seed=self.seed,
        )


@dataclass(frozen=True, slots=True)
class OutputOptions:
    """Forms and files of the document."""

    show: Annotated[Path | None, typer.Option(help="Measure nothing; print or plot this document.")] = None
    json: options.Json = False
    markdown: Annotated[bool, typer.Option("--markdown", help="Print markdown.")] = False
    output: Annotated[
        Path | None,
        typer.Option(help="Also write the JSON document here, while measuring; as JSON lines if it ends in .jsonl."),
    ] = None
    resume: Annotated[
        Path | None, typer.Option(help="Continue an interrupted run from its document, and write it back.")
    ] = None
    plot: Annotated[Path | None, typer.Option(help="Draw the figures into this folder, as PNG and SVG.")] = None
    page: Annotated[
        Path | None,
        typer.Option(help="Write a page of Markdown with the tables, and its figures into a folder next to it."),
    ] = None

    def check(self) -> None:
        """Raise for what would only show after the measurement."""
        if self.resume is not None and self.show is not None:
            raise ConfigError("--resume", "must be left out with --show", str(self.resume), "Give only one.")
        if self.output is not None:
            check_document_file("output", self.output)
        elif self.resume is not None:
            check_document_file("resume", self.resume)
        if self.plot is not None or self.page is not None:
            check_matplotlib()
        if self.page is not None and (not self.page.suffix or self.page.is_dir()):
            raise ConfigError(
                "page", "must be a file whose name ends in .md", str(self.page), "For example results.md."
            )
        for field, given in (("plot", self.plot), ("page", self.page)):
            if given is not None:
                _check_folder(field, given, given if field == "plot" else given.with_suffix(""))


def _check_folder(field: str, given: Path, folder: Path) -> None:
    """Raise where the folder of the figures cannot be made or written.

    Args:
        given: what the option names.
    """
    if folder.exists() and not folder.is_dir():
        remedy = f"{str(folder)!r} is a file. Choose another name."
        raise ConfigError(field, "must have its figures in a folder", str(given), remedy)
    above = next(part for part in (folder, *folder.absolute().parents) if part.exists())
    check_room(field, above, str(given))
