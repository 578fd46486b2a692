"""A bar on stderr for results that come one by one; nothing where stderr is no terminal."""

from collections.abc import Iterable, Iterator
from typing import TypeVar

from rich.console import Console
from rich.progress import track

Item = TypeVar("Item")


def with_bar(
    items: Iterable[Item], *, total: int | None, done: int = 0, is_shown: bool = True, label: str = "prompts"
) -> Iterator[Item]:
    """The same items, counted from `done` to `total`; `None` is an unknown total. `label` stands before the bar."""
    console = Console(stderr=True)
    is_shown = is_shown and console.is_terminal
    return iter(track(items, label, total=total, completed=done, console=console, disable=not is_shown))
