"""Prompts to measure on: the set that ships with the package, and files in the forms that benchmarks come in.

Lines of a `.jsonl` file (or `.jsonl.gz`) have the forms of `tools/prompt_lines.py`. Ids that other files may have too
begin with the file's name; HumanEval's lines, `task_id` and `prompt`, count as code, questions without a task as math.

Any other file is one prompt as it stands, an empty one none. A folder is all the files in it, each read as if it were
named; its texts count in a task of their sub-folder. Of several turns the first is measured.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import Any

from hf_specdec.api.many_prompts.prompt_inputs import chat_text
from hf_specdec.common.files import check_path, json_value, lines_of, read_text
from hf_specdec.errors import ConfigError
from hf_specdec.tools.prompt_lines import Message, NotAPromptError, read_line

LINES = ".jsonl"  # what files end in whose lines are prompts, packed or not


@dataclass(frozen=True, slots=True)
class Prompt:
    """One prompt.

    Attributes:
        id (`str`): its name, unique within a run.
        task (`str`): the column it counts in.
        text (`str`): what the user says, or a text to continue.
        is_chat (`bool`): whether it is put through the tokenizer's chat template, where there is one.
        before (`tuple[Mapping, ...]`): messages of a chat before the text.
    """

    id: str
    task: str
    text: str
    is_chat: bool = False
    before: tuple[Message, ...] = ()

    def encode(self, tokenizer: Any) -> list[int]:
        """Token ids of the prompt.

        Raises:
            ConfigError: the tokenizer leaves nothing of it.
        """
        messages = [*self.before, {"role": "user", "content": self.text}]
        if self.is_chat and getattr(tokenizer, "chat_template", None):
            ids = tokenizer(chat_text(tokenizer, messages), add_special_tokens=False)["input_ids"]
        else:
            ids = tokenizer("\n\n".join(message["content"] for message in messages))["input_ids"]
        if not ids:
            remedy = "Leave this one out: the tokenizer drops it."
            raise ConfigError("prompts", "must have a token each", self.text[:80], remedy)
        return list(ids)


def default_prompts() -> list[Prompt]:
    """The set that ships with the package: Python code, for the embedded target."""
    return _from_folder(Path(__file__).parent / "default_prompts")


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
    return [Prompt(name, task, text)] if text else []


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
    return Prompt(str(name), read.task or usual, read.turns[0], read.is_chat, read.before)
