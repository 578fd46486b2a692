"""`hf-specdec generate --prompts-file F.jsonl --out G.jsonl`: many prompts, resumable, also in several processes.

Each process takes its share of the prompts and appends to the one output; what is done is not done again. Processes
that share one model (tensor parallel) go through the prompts together.
"""

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

import hf_specdec
from hf_specdec.common.progress import with_bar
from hf_specdec.errors import ConfigError, shown
from hf_specdec.tools.cli.job import Job
from hf_specdec.tools.cli.job_file import JobFile, check_job_output
from hf_specdec.tools.cli.report import noting_interrupts
from hf_specdec.tools.cli.where import processes
from hf_specdec.tools.prompt_lines import BadLine, PromptLine, read_file

BATCH_SIZE = 8


@dataclass(frozen=True, slots=True)
class ManyOptions:
    """The options of a job over a file."""

    prompts_file: Annotated[
        Path | None,
        typer.Option(
            help="A .jsonl file (.gz too) of prompts: a string a line, or an object with prompt or text, or for a chat "
            "with messages, turns, instruction or question. Needs --out."
        ),
    ] = None
    out: Annotated[
        Path | None,
        typer.Option(
            help="With --prompts-file: the .jsonl file of results. A job that was interrupted goes on where it stopped."
        ),
    ] = None
    batch_size: Annotated[
        int | None, typer.Option(min=1, help=f"With --prompts-file: prompts decoded together. Default: {BATCH_SIZE}.")
    ] = None
    retry_failed: Annotated[
        bool, typer.Option("--retry-failed", help="With --prompts-file: try prompts again that failed before.")
    ] = False

    @property
    def is_asked(self) -> bool:
        """True where there is a file; after `check` there are both."""
        return self.prompts_file is not None

    @property
    def files(self) -> tuple[Path, Path]:
        """The prompts and the results."""
        assert self.prompts_file is not None and self.out is not None
        return self.prompts_file, self.out

    def check(self, *, prompt: str | None, compare: bool, chat: bool) -> None:
        """Refuse options that do not go with a file of prompts, and an output that no such job wrote."""
        if (self.prompts_file is None) != (self.out is None):
            given, missing = ("--prompts-file", "--out") if self.out is None else ("--out", "--prompts-file")
            raise ConfigError(missing, f"must be given with {given}", None, f"Add {missing} FILE.jsonl.")
        if not self.is_asked:
            for option, value in {"--batch-size": self.batch_size, "--retry-failed": self.retry_failed or None}.items():
                if value is not None:
                    raise ConfigError(option, "must come with --prompts-file", value, "Give the job's two files.")
            return
        if prompt is not None:
            raise ConfigError("PROMPT", "must be left out with --prompts-file", prompt, "Give one of the two.")
        if compare:
            raise ConfigError("--compare", "must be left out with --prompts-file", True, "`hf-specdec bench` compares.")
        if chat:
            remedy = 'Write {"question": "..."} or {"messages": [...]} a line.'
            raise ConfigError("--chat", "must be left out with --prompts-file, whose lines tell chats", True, remedy)
        prompts_file, out = self.files
        read_prompts(prompts_file)
        check_job_output(out, prompts_file)


def read_prompts(path: Path) -> list[PromptLine | BadLine]:
    """The prompts of a file; errors name the line and show it."""
    return [
        BadLine(line.line, f"line {number} {line.error}, but is {shown(line.line)}")
        if isinstance(line, BadLine)
        else line
        for number, line in read_file(path, "--prompts-file")
    ]


def own_device() -> torch.device | None:
    """The device of this process where several share a job; `None` for one process, which takes what there is."""
    state = processes()
    return state.device if state.num_processes > 1 else None


def run_many(job: Job, asked: ManyOptions, settings: Mapping[str, Any], *, is_one_model: bool) -> dict[str, Any] | None:
    """Generate for every prompt that is not done yet.

    Args:
        settings: what decides the results, as JSON values: an output of other settings is not gone on with.
        is_one_model: whether the processes of this launch share one model: then all go through all prompts, and the
            first writes.

    Returns:
        How many prompts the output holds, how many of them failed, and why, by their numbers; `None` in all processes
        but the first.
    """
    state, (prompts_file, out) = processes(), asked.files
    prompts = [
        line if isinstance(line, BadLine) else _asked(line, job.tokenizer) for line in read_prompts(prompts_file)
    ]
    file = JobFile(out, {**settings, "seed": job.seed or 0})
    with file.held() if state.is_main_process else contextlib.nullcontext():
        if state.is_main_process:
            file.recover()
        state.wait_for_everyone()
        told = [{"line": one.line} if isinstance(one, BadLine) else {"prompt": one} for one in prompts]
        done = file.done(told, retries_failed=asked.retry_failed)
        count, own = (1, 0) if is_one_model else (state.num_processes, state.process_index)
        state.wait_for_everyone()  # before anything is added to what all have read
        share = [index for index in range(len(prompts)) if index % count == own]
        todo = [index for index in share if index not in done]
        lines = _results(job, prompts, todo)
        with noting_interrupts(f"{out} keeps the results so far; the same command continues"):
            for line in with_bar(lines, total=len(share), done=len(share) - len(todo), is_shown=state.is_main_process):
                if state.is_main_process or not is_one_model:
                    file.append(line)
        state.wait_for_everyone()
        if not state.is_main_process:
            return None
        written = file.finish(len(prompts))
    failures = {line["index"]: line["error"] for line in written if "error" in line}
    return {"num_prompts": len(written), "num_failed": len(failures), "failures": failures}


def _results(job: Job, prompts: list[Any], todo: list[int]) -> Iterator[dict[str, Any]]:
    """Output lines, in the order in which texts end."""
    good = [index for index in todo if not isinstance(prompts[index], BadLine)]
    for index in todo:
        if isinstance(prompts[index], BadLine):
            yield {"index": index, "line": prompts[index].line, "error": prompts[index].error}
    results = hf_specdec.generate_many(
        job.model,
        (prompts[index] for index in good),
        indices=good,
        tokenizer=job.tokenizer,
        seed=job.seed or 0,
        **job.options,
    )
    for result in results:
        line: dict[str, Any] = {"index": result.index, "prompt": result.prompt, "text": result.text}
        line["token_ids"] = result.token_ids
        if result.error is not None:
            line["error"] = " ".join(str(result.error).split()) or type(result.error).__name__
        yield line


def _asked(line: PromptLine, tokenizer: Any) -> Any:
    """A text, or the messages of a chat up to the model's first answer."""
    return [*line.before, line.chat[len(line.before)]] if line.goes_through_template(tokenizer) else line.text
