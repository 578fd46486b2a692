"""Writes the chats that a draft for a small chat model is trained on: ``python -m demos.train_smollm2 chats.jsonl``.

    hf-specdec train --model smollm2 --prompts chats.jsonl --out head --num-texts 1280 --max-new-tokens 80

Seven kinds of task: questions, instructions, rewriting, summaries and extraction of the articles that ship, code to
write and to explain (functions of the standard library), mathematics, and chats of two turns. All are made here from
lists of subjects; none is of a benchmark.
"""

import ast
import itertools
import json
import random
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import typer

from demos.train_smollm2 import subjects
from hf_specdec.tools.command_errors import run_program
from hf_specdec.tools.summarize.articles import read_articles

MODULES = ("bisect", "calendar", "colorsys", "fnmatch", "heapq", "keyword", "shlex", "statistics", "string", "textwrap")
SHORTEST, LONGEST = 120, 700  # characters of a function that is explained
Chat = list[str]


def questions() -> Iterator[Chat]:
    """Questions about every subject."""
    for question, topic in itertools.product(subjects.QUESTIONS, subjects.TOPICS):
        yield [question.format(topic)]


def instructions() -> Iterator[Chat]:
    """Texts to write."""
    for form, scene in itertools.product(subjects.WRITINGS, subjects.SCENES):
        yield [form.format(scene)]


def rewriting() -> Iterator[Chat]:
    """Short texts to change."""
    for form, text in itertools.product(subjects.CHANGES, subjects.NOTES):
        yield [f"{form}\n\n{text}"]


def articles() -> Iterator[Chat]:
    """Articles, whole and in parts, to summarise and to answer from."""
    for article in read_articles(None):
        sentences = article.text.split(". ")
        parts = {". ".join(sentences[start : start + 6]).rstrip(".") + "." for start in range(0, len(sentences), 3)}
        for form, part in itertools.product(subjects.READINGS, sorted(parts)):
            yield [f"{form}\n\n{part}"]


def code() -> Iterator[Chat]:
    """Functions to write, and functions of the standard library to explain and to change."""
    for form, job in itertools.product(subjects.CODE_FORMS, subjects.JOBS):
        yield [form.format(job)]
    for form, function in itertools.product(subjects.CODE_CHANGES, _functions()):
        yield [f"{form}\n\n```python\n{function}\n```"]


def mathematics(generator: random.Random) -> Iterator[Chat]:
    """Word problems with drawn numbers."""
    for problem, name, _ in itertools.product(subjects.PROBLEMS, subjects.NAMES, range(2)):
        first, second, third = (generator.randint(2, 40) for _ in range(3))
        yield [problem.format(name=name, a=first, b=second, c=third)]


def conversations() -> Iterator[Chat]:
    """Two turns, the second about the answer to the first."""
    for first, second in itertools.product(subjects.OPENINGS, subjects.FOLLOW_UPS):
        yield [first, second]


def _functions() -> list[str]:
    """Short functions of the standard library."""
    found = []
    for module in MODULES:
        text = (Path(sysconfig.get_path("stdlib")) / f"{module}.py").read_text("utf-8")
        for node in ast.walk(ast.parse(text)):
            source = ast.get_source_segment(text, node) if isinstance(node, ast.FunctionDef) else None
            if source and SHORTEST <= len(source) <= LONGEST and node.col_offset == 0:
                found.append(source)
    return found


def main(
    out: Annotated[Path, typer.Argument(help="The .jsonl file to write.")],
    per_kind: Annotated[int, typer.Option(min=1, help="Most chats of each kind.")] = 400,
    seed: Annotated[int, typer.Option(help="Of the choice among all chats.")] = 0,
) -> None:
    """Write chats of every kind, a JSON object with `turns` a line."""
    generator = random.Random(seed)
    kinds: dict[str, list[Chat]] = {
        "question": list(questions()),
        "writing": list(instructions()),
        "rewriting": list(rewriting()),
        "reading": list(articles()),
        "code": list(code()),
        "math": list(mathematics(generator)),
        "conversation": list(conversations()),
    }
    lines: list[dict[str, Any]] = []
    for kind, chats in kinds.items():
        chosen = generator.sample(chats, min(per_kind, len(chats)))
        lines += [{"id": f"{kind}/{number}", "task": kind, "turns": turns} for number, turns in enumerate(chosen)]
    out.write_text("".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines), "utf-8")
    print(f"{len(lines)} chats: " + ", ".join(f"{len(chats)} {kind} to choose from" for kind, chats in kinds.items()))


if __name__ == "__main__":
    run_program(main)
