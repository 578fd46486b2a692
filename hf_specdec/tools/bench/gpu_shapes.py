"""The shapes that are measured on a GPU, and which part of them. Knows nothing about models."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from typing import Any, TypeVar

Row = TypeVar("Row")


@dataclass(frozen=True, slots=True)
class Shape:
    """A size of the embedded target and what is measured at it.

    Attributes:
        size (`tuple[int, int] | None`): hidden size and layers; `None` leaves the model as it is.
        dtype (`str`): precision of the target and its draft.
        batches, contexts (`tuple[int, ...]`): rows of a batch, and tokens of their prompts.
        max_new_tokens (`int`): tokens written in each call.
    """

    size: tuple[int, int] | None
    dtype: str = "bf16"
    batches: tuple[int, ...] = (1, 8)
    contexts: tuple[int, ...] = (512, 8192)
    max_new_tokens: int = 128


@dataclass(frozen=True, slots=True)
class Selection:
    """Part of the shapes that is measured; all of it by default.

    Attributes:
        batches, contexts (`tuple[int, ...]`): in the place of the shape's, where there are any.
        rows (`tuple[str, ...]`): shell patterns of the rows' names. They are compared with the first of those named
            plain, which is the first of all where none is chosen.
        steps (`bool`): whether what a step costs is, too.
        num_texts (`int`): that each row writes, each once, after a first call on another text.
        num_prompts (`int`): default prompts by which steps are measured.
        compile_mode (`str | None`): of `torch.compile`, for rows over static caches; `None` is transformers' choice.
        compile_options (`Mapping[str, Any]`): of inductor, by name, in the place of a mode.
        sdpa_backend (`str | None`): of `torch.nn.attention.SDPBackend`, in lower case; `None` is torch's choice.
        profiles (`bool`): whether one more call of each row says what it asks of the device.
        row_seconds (`float | None`): after which a row is given up; `None` for never.
    """

    batches: tuple[int, ...] = ()
    contexts: tuple[int, ...] = ()
    rows: tuple[str, ...] = ()
    steps: bool = True
    num_texts: int = 4
    num_prompts: int = 12
    compile_mode: str | None = None
    compile_options: Mapping[str, Any] = field(default_factory=dict)
    sdpa_backend: str | None = None
    profiles: bool = False
    row_seconds: float | None = None

    def of(self, rows: Mapping[str, Row]) -> dict[str, Row]:
        """Those of the rows, by name, that are measured."""
        chosen = {
            name: row
            for name, row in rows.items()
            if not self.rows or any(fnmatchcase(name, pattern) for pattern in self.rows)
        }
        first = next(iter(rows))
        has_plain = not chosen or any(name.startswith("plain") for name in chosen)
        return chosen if has_plain else {first: rows[first], **chosen}


SHAPES: Mapping[str, Shape] = {
    "1B": Shape((2048, 22)),
    "7B": Shape((4096, 32)),
    "tiny": Shape(None, dtype="fp32", batches=(1, 2), contexts=(32,), max_new_tokens=8),
}

PLAIN, AUTO = "plain, static cache", "auto, static cache"
FIGURES: Sequence[tuple[str, Selection]] = tuple(
    (name, Selection((batch,), (context,), rows, steps=False, num_texts=3, profiles=profiles, row_seconds=180.0))
    for name, batch, context, profiles, rows in (  # what says most first
        ("7B", 1, 512, True, (PLAIN, AUTO)),
        ("7B", 1, 512, False, (f"{PLAIN}, sampled", f"{AUTO}, sampled")),
        ("7B", 1, 512, False, (PLAIN, "auto+head, static cache")),
        ("7B", 8, 512, False, (PLAIN, AUTO)),
        ("7B", 1, 8192, False, (PLAIN, AUTO)),
        ("7B", 1, 512, False, (PLAIN, "spec_method=plain, static cache")),
        ("1B", 1, 512, True, (PLAIN, AUTO, f"{PLAIN}, sampled", f"{AUTO}, sampled")),
        ("1B", 1, 512, False, (PLAIN, "transformers' *, static cache")),
    )
)


def figures_of(shapes: Sequence[str] = ()) -> Sequence[tuple[str, Selection]]:
    """Get the shapes of `FIGURES` and their parts in order; for other shapes the same rows at their own contexts."""
    parts = [(shape, replace(part, contexts=())) for shape in shapes for _, part in FIGURES]
    return parts or FIGURES
