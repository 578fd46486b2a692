"""`hf-specdec generate --prompts-file F.jsonl --out G.jsonl`: many prompts, resumable, also in several processes.

A line of the results has the `index` of its prompt, in the order in which texts end. A job that is started again leaves
out the indices that are there. Each of several processes takes its share and writes a file of its own.
"""

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import typer

import hf_specdec
from hf_specdec.common.files import check_output, json_value, lines_of, read_text
from hf_specdec.common.progress import with_bar
from hf_specdec.errors import ConfigError, counted
from hf_specdec.tools.cli.job import Job
from hf_specdec.tools.cli.processes import processes
from hf_specdec.tools.cli.report import noting_interrupts
from hf_specdec.tools.command_errors import note
from hf_specdec.tools.prompt_lines import NotAPromptError, read_line


def generate_file(job: Job, prompts_file: Path, out: Path, batch_size: int) -> None:
    """Generate for every prompt that has no result yet."""
    state = processes()
    lines = [line for _, line in lines_of(read_text(prompts_file, "prompts_file"))]
    file = out if state.num_processes == 1 else _file_of(out, state.process_index)
    check_output("out", file)
    done = set().union(*(_indices(each, len(lines)) for each in (out, *out.parent.glob(_file_of(out, "*").name))))
    state.wait_for_everyone()  # before anything is added to what all have read
    todo, num_failed = [index for index in range(len(lines)) if index not in done], 0
    share = todo[state.process_index :: state.num_processes]
    results = _results(job, lines, share, batch_size)
    with (
        open(file, "a", encoding="utf-8") as written,
        noting_interrupts(f"{file} keeps the results so far; the same command continues"),
    ):
        for result in with_bar(results, total=len(share), is_shown=state.is_main_process):
            num_failed += "error" in result
            written.write(json.dumps(result) + "\n")
            written.flush()
    note(f"{counted(len(share), 'prompt')} to {file}, {num_failed} failed; {len(done)} were done before", "dim")
    state.wait_for_everyone()
    if num_failed:
        note('hint: take the lines with "error" out of the results to try them again', "cyan")
        raise typer.Exit(1)


def _file_of(out: Path, rank: int | str) -> Path:
    """The results of one of several processes."""
    return out.with_name(f"{out.stem}-rank{rank}{out.suffix}")


def _indices(file: Path, num_prompts: int) -> set[int]:
    """Indices of the prompts that have a result; the beginning of a line, left by an interruption, is cut off."""
    if not file.exists():
        return set()
    content = file.read_bytes()
    end = content.rfind(b"\n") + 1
    results = [json_value(line.decode("utf-8", "replace")) for line in content[:end].splitlines()]
    indices = {result.get("index", -1) if isinstance(result, dict) else -1 for result in results}
    is_ours = indices <= set(range(num_prompts)) and content[end:].startswith(b'{"index": '[: len(content) - end])
    if not is_ours:
        raise ConfigError("out", "must be a new file, or hold results of these prompts", str(file), "Choose another.")
    if end < len(content):
        with file.open("r+b") as cut:
            cut.truncate(end)
    return indices


def _results(job: Job, lines: Sequence[str], share: Sequence[int], batch_size: int) -> Iterator[dict[str, Any]]:
    """Lines of the results, in the order in which texts end."""
    model, tokenizer = job.loaded.model, job.loaded.tokenizer
    kwargs = {**job.options, **job.method, "tokenizer": tokenizer, "max_batch_size": batch_size, "seed": job.seed or 0}
    prompts: dict[int, Any] = {}
    for index in share:
        try:
            line = read_line(lines[index])
        except NotAPromptError as error:
            yield {"index": index, "line": lines[index][:200], "error": str(error)}
        else:
            is_chat = line.goes_through_template(tokenizer)
            prompts[index] = [*line.before, line.chat[len(line.before)]] if is_chat else line.text
    for result in hf_specdec.generate_many(model, prompts.values(), indices=list(prompts), **kwargs):
        reason = "" if result.error is None else " ".join(str(result.error).split()) or type(result.error).__name__
        written = {"prompt": result.prompt, "text": result.text, "token_ids": result.token_ids}
        yield {"index": result.index, **written, **({"error": reason} if reason else {})}
