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
        model, head (`str`): the target and its head: embedded, or published and fetched.
    """

    size: tuple[int, int] | None
    dtype: str = "bf16"
    batches: tuple[int, ...] = (1, 8)
    contexts: tuple[int, ...] = (512, 8192)
    max_new_tokens: int = 128
    model: str | None = None
    head: str | None = None


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
        max_new_tokens (`int | None`): in the place of the shape's.
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
    max_new_tokens: int | None = None

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
    "SmolLM2": Shape(None, model="smollm2", head="smollm2-head"),
    "tiny": Shape(None, dtype="fp32", batches=(1, 2), contexts=(32,), max_new_tokens=8),
}

PLAIN, AUTO = "plain, static cache", "auto, static cache"
IN_ORDER = ", in order"  # ends the names of rows that round alike (docs/concepts/exactness.md)
PEERS = ("transformers' *, static cache", "economize:*", "flashspec:*")


def _figures(shape: str, *rows: str, batch: int = 1, context: int = 512, **more: Any) -> tuple[str, Selection]:
    settings: dict[str, Any] = {"steps": False, "num_texts": 3, "row_seconds": 180.0, **more}
    return shape, Selection((batch,), (context,), rows, **settings)


FIGURES: Sequence[tuple[str, Selection]] = (  # what says most first
    _figures("7B", PLAIN, AUTO, profiles=True),
    _figures("7B", f"{PLAIN}, sampled", f"{AUTO}, sampled"),
    _figures("7B", PLAIN, f"*{PLAIN}{IN_ORDER}", f"{AUTO}{IN_ORDER}"),
    _figures("7B", PLAIN, "auto+head, static cache"),
    _figures("1B", PLAIN, AUTO, f"{PLAIN}, sampled", f"{AUTO}, sampled", profiles=True),
    # How many texts are equal: greedily and sampled, by plain generate and in order.
    _figures(
        "1B", f"{PLAIN}*", f"*{PLAIN}{IN_ORDER}*", f"{AUTO}{IN_ORDER}*", context=256, num_texts=31, max_new_tokens=256
    ),
    _figures("1B", PLAIN, *PEERS),
    _figures("SmolLM2", PLAIN, AUTO, f"*{PLAIN}{IN_ORDER}", f"{AUTO}{IN_ORDER}", "auto+head, static cache", *PEERS),
    _figures("7B", PLAIN, AUTO, batch=8),
    _figures("7B", PLAIN, AUTO, context=8192),
    _figures("7B", PLAIN, "spec_method=plain, static cache"),
)


def figures_of(shapes: Sequence[str] = ()) -> Sequence[tuple[str, Selection]]:
    """Get the shapes of `FIGURES` and their parts in order; for other shapes the same rows at their own contexts."""
    parts = [(shape, replace(part, contexts=())) for shape in shapes for _, part in FIGURES]
    return parts or FIGURES
