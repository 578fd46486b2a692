"""`hf-specdec generate --prompts-file F.jsonl --out G.jsonl`: many prompts, resumable, also under accelerate launch.

Each process takes its share of the prompts and appends to the one output; what is done is not done again.
"""

import gzip
import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from accelerate import PartialState  # type: ignore[import-untyped]
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from transformers import PreTrainedTokenizerBase

import hf_specdec
from hf_specdec.cli.job_file import JobFile
from hf_specdec.errors import ConfigError

__all__ = ["ManyJob", "read_prompts", "run_many"]

FORMS = 'a string, or an object with "prompt", "question", "text" or "turns"'


@dataclass(frozen=True, slots=True)
class ManyJob:
    """One job over a file.

    Attributes:
        options: keyword arguments of `generate_many`, the method's among them.
        settings: what decides the results, as JSON values: an output of other settings is not gone on with.
    """

    model: Any
    tokenizer: PreTrainedTokenizerBase
    options: Mapping[str, Any]
    settings: Mapping[str, Any]
    batch_size: int
    seed: int


def read_prompts(path: Path) -> list[Any]:
    """The prompts of a `.jsonl` file, packed with gzip or not; a line that is none of the forms stays an error.

    Raises:
        ConfigError: there is no such file, or it is empty.
    """
    if not path.is_file():
        raise ConfigError("--prompts-file", "must be an existing file", str(path), "Check the spelling.")
    raw = path.read_bytes()
    text = (gzip.decompress(raw) if path.suffix == ".gz" else raw).decode("utf-8")
    prompts = [_prompt(line) for line in text.splitlines() if line.strip()]
    if not prompts:
        raise ConfigError("--prompts-file", "must hold at least one line", str(path), f"A line is {FORMS}.")
    return prompts


def run_many(job: ManyJob, prompts_file: Path, out: Path) -> tuple[int, int]:
    """Generate for every prompt that is not done yet; returns how many lines the output has, and how many failed."""
    state = PartialState()
    prompts = read_prompts(prompts_file)
    content = hashlib.sha256(json.dumps(prompts).encode()).hexdigest()
    file = JobFile(out, {**job.settings, "prompts": content, "seed": job.seed})
    if state.is_main_process:
        file.recover()
    state.wait_for_everyone()
    done = file.done()
    share = [index for index in range(len(prompts)) if index % state.num_processes == state.process_index]
    todo = [index for index in share if index not in done]
    for result in _shown(_results(job, prompts, todo), len(share), len(share) - len(todo), state.is_main_process):
        file.append(result)
    state.wait_for_everyone()
    if not state.is_main_process:
        return 0, 0
    count = file.finish()
    failed = sum("error" in json.loads(line) for line in out.read_text("utf-8").splitlines())
    return count, failed


def _results(job: ManyJob, prompts: list[Any], todo: list[int]) -> Iterator[dict[str, Any]]:
    """Output lines, in the order in which texts end."""
    good = [index for index in todo if isinstance(prompts[index], str)]
    for index in todo:
        if not isinstance(prompts[index], str):
            yield {"index": index, "prompt": prompts[index]["line"], "error": f"must be {FORMS}"}
    results = hf_specdec.generate_many(
        job.model,
        (prompts[index] for index in good),
        indices=good,
        tokenizer=job.tokenizer,
        max_batch_size=job.batch_size,
        seed=job.seed,
        **job.options,
    )
    for result in results:
        line: dict[str, Any] = {"index": result.index, "prompt": result.prompt, "text": result.text}
        line["token_ids"] = result.token_ids
        if result.error is not None:
            line["error"] = " ".join(str(result.error).split()) or type(result.error).__name__
        yield line


def _shown(lines: Iterator[dict[str, Any]], total: int, done: int, is_shown: bool) -> Iterator[dict[str, Any]]:
    """The same lines, counted by a bar on stderr."""
    columns = (TextColumn("prompts"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    console = Console(stderr=True)
    with Progress(*columns, console=console, disable=not is_shown or not console.is_terminal) as bar:
        task = bar.add_task("prompts", total=total, completed=done)
        for line in lines:
            yield line
            bar.advance(task)


def _prompt(line: str) -> Any:
    """The text of one line; `{"line": ...}` where it has none."""
    try:
        entry: Any = json.loads(line)
    except json.JSONDecodeError:
        entry = None
    match entry:
        case (
            str(text)
            | {"prompt": str(text)}
            | {"question": str(text)}
            | {"text": str(text)}
            | {"turns": [str(text), *_]}
        ):
            return text
    return {"line": line[:200]}
