"""Prompts are read from every form that benchmarks come in, and what is wrong with a file is said by line."""

import dataclasses
import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from hf_specdec.errors import ConfigError
from hf_specdec.tools.bench.prompts import Prompt, default_prompts, load_prompts, spread

FORMS: dict[str, tuple[dict[str, Any], Prompt]] = {
    "spec-bench": (
        {"question_id": 81, "category": "writing", "turns": ["One", "Two"]},
        Prompt("file/81", "writing", "One", is_chat=True),
    ),
    "ours": ({"id": "x", "task": "qa", "turns": ["One"]}, Prompt("x", "qa", "One", is_chat=True)),
    "humaneval": (
        {"task_id": "HumanEval/0", "prompt": "def f():\n", "entry_point": "f"},
        Prompt("HumanEval/0", "code", "def f():\n"),
    ),
    "gsm8k": ({"question": "How many?", "answer": "#### 3"}, Prompt("file/1", "math", "How many?", is_chat=True)),
}


def write(folder: Path, *entries: dict[str, Any]) -> Path:
    path = folder / "file.jsonl"
    path.write_text("".join(json.dumps(entry) + "\n" for entry in entries), encoding="utf-8")
    return path


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("packed", [False, True], ids=["plain", "gz"])
def test_a_line_is_known_by_its_keys(tmp_path: Path, form: str, packed: bool) -> None:
    entry, expected = FORMS[form]
    path = write(tmp_path, entry)
    if packed:
        path = path.with_suffix(".jsonl.gz")
        path.write_bytes(gzip.compress((json.dumps(entry) + "\n").encode()))
    assert load_prompts([path]) == [expected]


def test_any_other_file_is_one_prompt_as_it_stands(tmp_path: Path) -> None:
    (tmp_path / "hello.py").write_text("def f(\n", encoding="utf-8")
    assert load_prompts([tmp_path / "hello.py"]) == [Prompt("hello.py", "text", "def f(\n")]


def test_a_folder_holds_tasks(tmp_path: Path) -> None:
    (tmp_path / "edit").mkdir()
    (tmp_path / "edit" / "one.txt").write_text("x", encoding="utf-8")
    assert load_prompts([tmp_path]) == [Prompt("edit/one", "edit", "x")]


def test_lines_of_a_file_in_a_folder_are_read_as_those_of_a_file_that_is_named(tmp_path: Path) -> None:
    """Packed or not, next to a file that is one prompt; files of one name in several folders keep their ids apart."""
    (tmp_path / "edit").mkdir()
    (tmp_path / "edit" / "one.txt").write_text("x", encoding="utf-8")
    lines = "".join(json.dumps(entry) + "\n" for entry, _ in FORMS.values())
    write(tmp_path, *(entry for entry, _ in FORMS.values()))
    (tmp_path / "edit" / "file.jsonl.gz").write_bytes(gzip.compress(lines.splitlines()[0].encode()))
    *packed, one = load_prompts([tmp_path / "edit"])
    assert packed == load_prompts([tmp_path / "edit" / "file.jsonl.gz"]) == [FORMS["spec-bench"][1]]
    assert one == Prompt("one", "text", "x")
    named = load_prompts([tmp_path / "file.jsonl"])
    in_folder = dataclasses.replace(packed[0], id="edit/file/81")
    assert load_prompts([tmp_path]) == [in_folder, Prompt("edit/one", "edit", "x"), *named]


def test_the_default_set_has_several_prompts_of_each_task(tokenizer: Any) -> None:
    tasks: dict[str, int] = {}
    for prompt in default_prompts():
        tasks[prompt.task] = tasks.get(prompt.task, 0) + 1
        assert len(tokenizer(prompt.text)["input_ids"]) <= 512
        assert prompt.text.endswith("\n")
    assert tasks == dict.fromkeys(("complete", "continue", "docstring", "edit", "fresh", "repeat"), 4)


def test_a_limit_takes_from_the_tasks_in_turn() -> None:
    prompts = [Prompt(f"{task}{number}", task, "x") for task in ("a", "b") for number in range(3)]
    assert [prompt.id for prompt in spread(prompts, 3)] == ["a0", "a1", "b0"]
    assert spread(prompts, 99) == prompts


@pytest.mark.parametrize(
    ("text", "match"),
    [
        ("{broken", "file.jsonl:1"),
        ('{"words": "x"}', "file.jsonl:1"),
        ('{"id": "x", "task": "t", "turns": []}', "turns of text"),
        ('{"id": "x", "task": "t", "turns": ["a"]}\n{"id": "x", "task": "t", "turns": ["b"]}', "unique"),
        ('{"question": "a\\ud800"}', "character 1 is half of a pair"),
        ("", "at least one prompt"),
    ],
)
def test_what_is_wrong_with_a_file_is_said(tmp_path: Path, text: str, match: str) -> None:
    path = tmp_path / "file.jsonl"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(ConfigError, match=match):
        load_prompts([path])


def test_an_empty_file_holds_no_prompt(tmp_path: Path) -> None:
    """As in a folder of sources."""
    (tmp_path / "__init__.py").touch()
    for place in (tmp_path, tmp_path / "__init__.py"):
        with pytest.raises(ConfigError, match="at least one prompt"):
            load_prompts([place])
    (tmp_path / "one.py").write_text("x", encoding="utf-8")
    assert load_prompts([tmp_path, tmp_path / "__init__.py"]) == [Prompt("one", "text", "x")]


def test_a_prompt_of_no_tokens_is_an_error(tokenizer: Any) -> None:
    with pytest.raises(ConfigError, match="must have a token each"):
        Prompt("empty", "text", "").encode(tokenizer)


def test_a_missing_file_and_a_bad_limit_are_errors(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="existing file"):
        load_prompts([tmp_path / "none.jsonl"])
    with pytest.raises(ConfigError, match="limit"):
        load_prompts(limit=0)
