"""Which fields each kind of document has, and of what type. Knows nothing about files.

A shape is a type; a dict of names and shapes, where names that end with a question mark may be missing and the key
`str` stands for any name; a list of one shape, followed by `...` where it may not be empty; a set of the values that
there are; `(None, shape)`; or a function that gives the shape for a value.
"""

from collections.abc import Mapping, Sequence
from typing import Any

Shape = Any
WORDS = {str: "text", int: "a whole number", float: "a number", bool: "true or false"}
LARGEST = 2**63 - 1


class Misshapen(ValueError):
    """A part of a document is missing or of another type.

    Attributes:
        path: names and places from the whole document to the part.
    """

    def __init__(self, path: Sequence[str | int], what: str) -> None:
        super().__init__(f"`{path_text(path)}` {what}")
        self.path = tuple(path)


def check_document(document: Mapping[str, Any]) -> None:
    """Raise unless a document has the fields of its kind.

    Raises:
        Misshapen: names the first that is missing or of another type.
    """
    _check(document, {"kind": set(_KINDS)}, ())
    _check(document, _COMMON | _KINDS[document["kind"]], ())


def path_text(path: Sequence[str | int]) -> str:
    """`models[0].records[3].seconds`."""
    return "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in path).removeprefix(".")


def _check(value: Any, shape: Shape, path: tuple[str | int, ...]) -> None:
    if isinstance(shape, tuple):
        if value is None:
            return
        shape = shape[1]
    if isinstance(shape, dict):
        _check_object(value, shape, path)
    elif isinstance(shape, list):
        if not isinstance(value, list):
            raise _wrong(path, "a list", value)
        if ... in shape and not value:
            raise Misshapen(path, "must hold something, but is empty")
        for place, part in enumerate(value):
            _check(part, shape[0], (*path, place))
    elif isinstance(shape, set):
        if not isinstance(value, str) or value not in shape:
            raise _wrong(path, f"one of {', '.join(sorted(shape))}", value)
    elif isinstance(shape, type):
        allowed = (int, float) if shape is float else shape
        if not isinstance(value, allowed) or (isinstance(value, bool) and shape is not bool):
            raise _wrong(path, WORDS[shape], value)
        if isinstance(value, int) and abs(value) > LARGEST:
            raise _wrong(path, f"at most {LARGEST}", value)
    else:
        _check(value, shape(value), path)


def _check_object(value: Any, shape: Mapping[Any, Shape], path: tuple[str | int, ...]) -> None:
    if not isinstance(value, dict):
        raise _wrong(path, "an object", value)
    for name, inner in shape.items():
        if name is str:
            for key, part in value.items():
                _check(part, inner, (*path, key))
        elif (known := name.removesuffix("?")) in value:
            _check(value[known], inner, (*path, known))
        elif known == name:
            raise Misshapen((*path, name), "is missing")


def _wrong(path: tuple[str | int, ...], what: str, value: Any) -> Misshapen:
    shown = repr(value)
    return Misshapen(path, f"must be {what}, but is {shown if len(shown) <= 60 else f'{shown[:60]}...'}")


_COMMON: dict[Any, Shape] = {
    "header": {
        "date": str,
        "hardware": {"cpu?": str, "accelerator?": str, "cores": int},
        "device": str,
        "threads": int,
        "versions": {str: str},
        "commit": (None, str),
    },
    "is_complete": bool,
    "settings": {"num_records?": int, "num_prompts?": int},
}
_MODEL: dict[Any, Shape] = {
    "name": str,
    "dtype": str,
    "model": {
        "name": str,
        "architecture": str,
        "parameters": int,
        "devices?": [str],
        "widening?": {"hidden_size": int, "num_layers": int, "largest_logit_difference": float},
    },
    "assistant": (None, str),
    "peak_memory": str,
}
_RECORD: dict[Any, Shape] = {
    "mode": {"greedy", "sampled"},
    **dict.fromkeys(("prompt", "task", "row"), str),
    **dict.fromkeys(("round", "turn", "num_tokens"), int),
    **dict.fromkeys(("seconds", "cpu_seconds"), float),
    "equal": bool,
    **dict.fromkeys(("blocks?", "drafted?"), (None, [int])),
    **dict.fromkeys(("draft_seconds?", "first_token_seconds?", "peak_memory_bytes?"), (None, float)),
    "mean_acceptance_length?": float,
    "reliability?": [[float, ...]],
    "plain_reason?": (None, str),
}
_RATIO = {"median": float, "low": float, "high": float}
_RATIO_POINT = {"num_tokens": int, "seconds": float, "ratio": _RATIO}
_POINT = {"num_nodes": int, "tokens_per_step": float}
_AUTO = [_POINT | dict.fromkeys(("draft_ms", "observe_ms", "reduce_ms"), float)]
_MEANS = ("outside", "views", "inside", "drafts", "reads", "tokens_per_step", "step_ms")
_STEPS: dict[Any, Shape] = {
    "auto": _AUTO,
    "steps": [
        {"name": str, "launches": (None, float), "graph_launches": (None, float), **dict.fromkeys(_MEANS, float)}
    ],
}
_BY_STEP = [f"{name}_{tokens}" for name in ("seconds", "over_bf16", "by_cpu_time") for tokens in (1, 8)]
_PRECISION: dict[Any, Shape] = {
    "precision": str,
    "model": _MODEL,
    **dict.fromkeys((*_BY_STEP, "weights_bytes", "weights_over_bf16", "max_abs_logit", "mean_kl"), float),
    "tokens": [{"method": str, "num_equal": int, "num_prompts": int}],
}
_GPU_ROW: dict[Any, Shape] = {
    "name": str,
    "batch": int,
    "context": int,
    **dict.fromkeys(("tokens_per_second", "over_plain", "first_call_seconds"), float),
    "later_token_seconds?": float,
    "mean_acceptance_length": (None, float),
    "num_graphs": (None, int),
    "equal": bool,
    "profile?": {
        **dict.fromkeys(("seconds", "device_seconds"), float),
        "kernels": [{"name": str, "count": int, "seconds": float}],
    },
}


def _precision(row: Any) -> Shape:
    """Of one that could not be loaded there is an error alone."""
    return {"precision": str, "error": str} if isinstance(row, dict) and "error" in row else _PRECISION


_KINDS: dict[str, dict[Any, Shape]] = {
    "speeds": {
        "settings": {"max_new_tokens": int, "rounds": int, "temperature": (None, float), "seed": int},
        "prompts": [{"id": str, "task": str}],
        "against?": [str],
        "models": [
            {
                **_MODEL,
                "rows": [{"name": str, "is_seed_exact": bool, "kind?": str}],
                "left_out": {str: str},
                "records": [_RECORD],
            },
            ...,
        ],
    },
    "cost": {
        "models": [
            {**_MODEL, "curves": [{"context_length": int, "points": [_RATIO_POINT, ...]}, ...]},
            ...,
        ]
    },
    "replay": {"drafters": {str: [_POINT]}},
    "many": {
        "models": [_MODEL],
        "rows": [
            {
                "row": str,
                **dict.fromkeys(("ratio", "seconds"), float),
                **dict.fromkeys(("batch_size", "num_equal", "num_prompts", "num_failed"), int),
            }
        ],
    },
    "precisions": {"rows": [_precision, ...]},
    "drafting": {
        "models": [_MODEL],
        "prompt_lookup": [{"context_length": int, "seconds": float, "transformers_seconds": float}],
        "auto": _AUTO,
    },
    "steps": {"models": [_MODEL], **_STEPS},
    "gpu": {
        "models": [_MODEL],
        "tests": (None, {"summary": str}),
        "copy_bandwidth": float,
        "shapes": [
            {
                "shape": str,
                "rows": [_GPU_ROW],
                "left_out?": [{"name": str, "batch": (None, int), "context": (None, int), "reason": str}],
                "bandwidth_share": (None, float),
                "steps?": _STEPS,
            }
        ],
    },
}
