"""Private parts of transformers' logits processors."""

from collections.abc import Callable
from typing import Any

__all__ = ["replace_prefix_function"]


def replace_prefix_function(processor: Any, replace: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
    """Change the user's function inside a `PrefixConstrainedLogitsProcessor`, which has no public name for it."""
    processor._prefix_allowed_tokens_fn = replace(processor._prefix_allowed_tokens_fn)
