"""A bar on stderr for results that come one by one; nothing where stderr is no terminal."""

from collections.abc import Iterable, Iterator
from typing import TypeVar

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

Item = TypeVar("Item")


def with_bar(
    items: Iterable[Item], *, total: int | None, done: int = 0, is_shown: bool = True, label: str = "prompts"
) -> Iterator[Item]:
    """The same items, counted from `done` to `total`; `None` is an unknown total. `label` stands before the bar."""
    columns = (TextColumn(label), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    console = Console(stderr=True)
    with Progress(*columns, console=console, disable=not is_shown or not console.is_terminal) as bar:
        task = bar.add_task(label, total=total, completed=done)
        for item in items:
            bar.advance(task)
            yield item
