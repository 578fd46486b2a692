"""Prompts to measure on: the set that ships with the package, and files in the forms that benchmarks come in.

Lines of a `.jsonl` file (or `.jsonl.gz`) have the forms of `tools/prompt_lines.py`. Ids that other files may have too
begin with the file's name; HumanEval's lines, `task_id` and `prompt`, count as code, questions without a task as math.

Any other file is one prompt as it stands, an empty one none. A folder is all the files in it, each read as if it were
named; its texts count in a task of their sub-folder. Text that nothing can be drafted for is made of random tokens.
Knows nothing about tokenizers or models.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from os import PathLike
from pathlib import Path

from hf_specdec.common.files import check_path, json_value, lines_of, read_text
from hf_specdec.errors import ConfigError
from hf_specdec.methods.common.config import check_positive
from hf_specdec.tools.prompt_lines import Message, NotAPromptError, read_line

RANDOM_TOKENS = "random tokens"
LINES = ".jsonl"  # what files end in whose lines are prompts, packed or not


@dataclass(frozen=True, slots=True)
class Prompt:
    """One prompt.

    Attributes:
        id (`str`): its name, unique within a run.
        task (`str`): the column it counts in.
        turns (`tuple[str, ...]`): what the user says, one after the other; the model answers each.
        is_chat (`bool`): whether it is put through the tokenizer's chat template, where there is one.
        num_random_tokens (`int`): where not 0, this many tokens of the model's vocabulary, drawn from `seed`, stand for
            the text.
        seed (`int`): of the random tokens.
        before (`tuple[Mapping, ...]`): messages of a chat before the first turn.
        batch (`tuple[Prompt, ...]`): where not empty, the prompts whose first turns are decoded together, in place of
            a text of its own.
    """

    id: str
    task: str
    turns: tuple[str, ...]
    is_chat: bool = False
    num_random_tokens: int = 0
    seed: int = 0
    batch: tuple["Prompt", ...] = ()
    before: tuple[Message, ...] = ()


def default_prompts() -> list[Prompt]:
    """The set that ships with the package: Python code, for the embedded target."""
    return _from_folder(Path(__file__).parent / "default_prompts")


def random_prompts(count: int, *, length: int) -> list[Prompt]:
    """Prompts of `length` random tokens, a task of their own: text in which nothing can be looked up."""
    check_positive("random_tokens", count, "Usual are 8 prompts.")
    check_positive("random_tokens", length, "Usual are 64 tokens.")
    return [
        Prompt(f"{RANDOM_TOKENS}/{length}/{seed}", RANDOM_TOKENS, ("",), False, length, seed) for seed in range(count)
    ]


def load_prompts(paths: Iterable[str | PathLike[str]] = (), *, limit: int | None = None) -> list[Prompt]:
    """Read files and folders; without any, the set that ships with the package.

    Args:
        paths (`Iterable[str]`, *optional*): files and folders.
        limit (`int`, *optional*): most prompts, taken from the tasks in turn.

    Raises:
        ConfigError: a path is none or does not exist, a line has none of the known forms, two prompts share an id.
    """
    paths = _listed(paths)
    files = [Path(path) for path in paths]
    prompts = [prompt for file in files for prompt in _from_path(file)] if files else default_prompts()
    if not prompts:
        raise ConfigError("prompts", "must hold at least one prompt", [str(file) for file in files], "Check the files.")
    seen: set[str] = set()
    for prompt in prompts:
        if prompt.id in seen:
            raise ConfigError("id", "must be unique within a run", prompt.id, "Give each prompt an id of its own.")
        seen.add(prompt.id)
    return prompts if limit is None else spread(prompts, limit)


def _listed(paths: Iterable[str | PathLike[str]]) -> list[str | PathLike[str]]:
    """The paths, each checked."""
    if isinstance(paths, str | bytes | PathLike) or not isinstance(paths, Iterable):
        raise ConfigError("paths", "must be a list of files and folders", paths, "Write [path], also for one.")
    listed = list(paths)
    for path in listed:
        check_path("paths", path, "a list of files and folders")
    return listed


def batched(prompts: Sequence[Prompt], sizes: Iterable[int]) -> list[Prompt]:
    """Batches of the prompts in their order, a task for each size; what fills no batch is left out.

    Size 1 stands for the first turns of the prompts, each in its own task.
    """
    found: list[Prompt] = []
    for size in dict.fromkeys(sizes):
        check_positive("batch_size", size, "Usual values are 1 to 16.")
        if size > len(prompts):
            rule = f"must be at most {len(prompts)}, the number of prompts"
            raise ConfigError("batch_size", rule, size, "Give more prompts, or a higher --limit.")
        if size == 1:
            found += [replace(prompt, turns=prompt.turns[:1]) for prompt in prompts]
            continue
        task = f"{size} rows"
        for start in range(0, len(prompts) - size + 1, size):
            rows = tuple(prompts[start : start + size])
            found.append(Prompt(f"{rows[0].id}, {task}", task, ("",), batch=rows))
    return found


def spread(prompts: Sequence[Prompt], limit: int) -> list[Prompt]:
    """At most `limit` prompts, one of each task in turn, in their first order."""
    if limit < 1:
        raise ConfigError("limit", "must be a whole number of at least 1", limit, "Leave it out for all prompts.")
    by_task: dict[str, list[Prompt]] = {}
    for prompt in prompts:
        by_task.setdefault(prompt.task, []).append(prompt)
    depth = max(map(len, by_task.values()), default=0)
    in_turn = [group[index] for index in range(depth) for group in by_task.values() if index < len(group)]
    chosen = {prompt.id for prompt in in_turn[:limit]}
    return [prompt for prompt in prompts if prompt.id in chosen]


def _from_path(path: Path) -> list[Prompt]:
    if path.is_dir():
        return _from_folder(path)
    if not path.is_file():
        raise ConfigError("prompts", "must be an existing file or folder", str(path), "Check the spelling.")
    name = path.name.removesuffix(".gz")
    return _from_lines(path, Path(path.name)) if name.endswith(LINES) else _from_text(path, name, "text")


def _from_folder(folder: Path) -> list[Prompt]:
    prompts = []
    for file in sorted(file for file in folder.rglob("*") if file.is_file()):
        name = file.relative_to(folder)
        if name.name.removesuffix(".gz").endswith(LINES):
            prompts += _from_lines(file, name)
        else:
            task = "text" if file.parent == folder else file.parent.name.replace("_", " ")
            prompts += _from_text(file, name.with_suffix("").as_posix(), task)
    return prompts


def _from_text(path: Path, name: str, task: str) -> list[Prompt]:
    text = read_text(path, "prompts")
    return [Prompt(name, task, (text,))] if text else []


def _from_lines(path: Path, name: Path) -> list[Prompt]:
    """A prompt for each line; `name` without its suffixes begins the ids of forms whose own are not unique."""
    stem = name.as_posix().removesuffix(".gz").removesuffix(LINES)
    return [_from_line(line, path, number, stem) for number, line in lines_of(read_text(path, "prompts"))]


def _from_line(line: str, path: Path, number: int, stem: str) -> Prompt:
    try:
        read = read_line(line)
    except NotAPromptError as error:
        raise ConfigError(f"{path.name}:{number}", str(error), line[:80], "Check the file.") from error
    fields = json_value(line)
    keys = fields.keys() if isinstance(fields, dict) else ()
    is_named = read.name is not None and "question_id" not in keys
    name = read.name if is_named else f"{stem}/{read.name or number}"
    usual = "code" if "task_id" in keys else "math" if "question" in keys else "chat" if read.is_chat else "text"
    return Prompt(str(name), read.task or usual, read.turns, read.is_chat, before=read.before)
