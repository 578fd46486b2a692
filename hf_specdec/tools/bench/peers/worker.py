"""Calls one library in a process of its own: a JSON line on stdin for each call, one on stdout for each answer.

    python worker.py economize

Needs torch, transformers and the library, and nothing of this package, so any environment can run it. The first line
sets it up: `model`, `draft` and `head` (folders or `null`), `dtype`, `device`, `threads`, `eos`. A call has `row`,
`options`, `ids` (token ids, row after row), `max_new_tokens`, `sampling` (`temperature` and `top_p`, or `null`),
`seed`, `is_watched` and perhaps `is_kept`, with which what a library records for a row serves the next call of it; its
answer `token_ids`, `seconds`, `cpu_seconds` and, of a watched call, `widths`: the tokens of each forward of the target.
An answer with `error` stands for one that the library did not give.
"""

import importlib
import json
import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import metadata
from typing import Any, TextIO

import torch


def main(library: str) -> None:
    """Answer until stdin ends."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print is no answer
    library_of = None
    for line in sys.stdin:
        asked = json.loads(line)
        try:
            if library_of is None:
                library_of = _set_up(library, asked)
                _tell(
                    answers, {"versions": {name: metadata.version(name) for name in (library, "transformers", "torch")}}
                )
            else:
                _tell(answers, _answer(library_of, asked))
        except Exception as error:  # noqa: BLE001  # whatever a library raises is what its row says
            text = " ".join(str(error).split())
            _tell(answers, {"error": f"{type(error).__name__}: {text}"[:300]})


def _set_up(library: str, setup: dict[str, Any]) -> Any:
    torch.set_num_threads(setup["threads"])
    return importlib.import_module(f"{library}_rows").Library(setup)


def _answer(library: Any, call: dict[str, Any]) -> dict[str, Any]:
    ids = [torch.tensor([row], device=library.model.device) for row in call["ids"]]
    widths: list[int] = []
    with library.decoder(call) as decode, _counted(library.model, widths if call["is_watched"] else None):
        torch.manual_seed(call["seed"])
        cpu_started, started = time.process_time(), time.perf_counter()
        token_ids = decode(ids)
        seconds, cpu_seconds = time.perf_counter() - started, time.process_time() - cpu_started
    return {"token_ids": token_ids, "seconds": seconds, "cpu_seconds": cpu_seconds, "widths": widths}


@contextmanager
def _counted(model: Any, widths: list[int] | None) -> Iterator[None]:
    """Append the width of each forward, seen at the first layer: some libraries call the layers themselves."""

    def seen(module: Any, args: Any, kwargs: dict[str, Any]) -> None:
        assert widths is not None
        widths.append(int((args[0] if args else kwargs["hidden_states"]).shape[1]))

    layer = model.get_decoder().layers[0]
    handle = None if widths is None else layer.register_forward_pre_hook(seen, with_kwargs=True)
    try:
        yield
    finally:
        if handle is not None:
            handle.remove()


def _tell(answers: TextIO, answer: dict[str, Any]) -> None:
    print(json.dumps(answer), file=answers, flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
