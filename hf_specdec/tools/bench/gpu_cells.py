"""Rows of one batch size and context on a GPU: each way to generate, compared with plain generate."""

import gc
import math
import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers import CompileConfig

from hf_specdec.api.enable import enable
from hf_specdec.compat import assists_static_caches
from hf_specdec.errors import SpecError, first_line
from hf_specdec.kernels.key_order import why_unordered
from hf_specdec.tools.bench.gpu_peers import ROWS as PEERS
from hf_specdec.tools.bench.gpu_peers import measure_peer
from hf_specdec.tools.bench.gpu_rows import TimeUp, at_most, measure_row, profile_call, same_length_texts
from hf_specdec.tools.bench.gpu_shapes import IN_ORDER, Selection, Shape
from hf_specdec.tools.bench.loaded_model import LoadedModel

STATIC = {"cache_implementation": "static"}
ONE_TOKEN = "spec_method=plain"  # this package's way to write one token a step
NUM_LOOKED_UP, MAX_ASSISTED = 10, 64  # tokens that transformers' prompt lookup drafts, and the most of its methods
LATE = ("took longer than", "no time was left")  # reasons of rows that may be tried again
SAMPLED = {"do_sample": True, "temperature": 0.7}


def measured_cell(
    shape: Shape,
    loaded: LoadedModel,
    chosen: Selection,
    batch: int,
    context: int,
    known: Sequence[dict[str, Any]] = (),
    end: float = math.inf,
) -> Iterator[dict[str, Any]]:
    """Measure tokens a second of each way to generate at one batch size and context; some have no room in memory.

    Sampled too where there is one sequence, which then has plain generate's tokens, of the shortest context. Texts are
    compared with those of plain generate, rows in order with those of one token a step.

    Args:
        known: rows that are measured already.
        end: by the monotonic clock; no row begins after it, and none goes on.
    """
    measured = {row["name"]: row for row in known if (row["batch"], row["context"]) == (batch, context)}
    texts = same_length_texts(loaded, batch, context, 1 + chosen.num_texts)
    max_new_tokens = chosen.max_new_tokens or shape.max_new_tokens
    methods = _methods(loaded, batch, context + max_new_tokens, chosen)
    ways = [methods]
    if batch == 1 and context == min(chosen.contexts or shape.contexts):
        ways.append(
            {f"{name}, sampled": arguments | SAMPLED for name, arguments in methods.items() if name not in PEERS}
        )
    for way in ways:
        plain: dict[str, Any] | None = None
        ordered: dict[str, Any] | None = None  # plain decoding in order
        theirs = 0.0  # tokens a second of transformers' fastest way
        for name, arguments in chosen.of(way).items():
            cell: dict[str, Any] = {"batch": batch, "context": context, "name": name}
            seconds, row = min(chosen.row_seconds or math.inf, end - time.monotonic()), measured.get(name)
            try:
                if row is None and seconds <= 0.0:
                    raise TimeUp
                limit = at_most(None if math.isinf(seconds) else seconds)
                with _attention(chosen.sdpa_backend), _in_order(loaded, name), limit:
                    if row is None and name in PEERS:
                        assert loaded.processes is not None
                        row = measure_peer(loaded.processes, name, texts, max_new_tokens)
                    elif row is None:
                        row = measure_row(loaded, texts, max_new_tokens, arguments)
                        if chosen.profiles:
                            row["profile"] = profile_call(loaded, texts[-1], max_new_tokens, arguments)
            except TimeUp:
                yield cell | {"reason": f"{LATE[0]} {seconds:.0f} s" if seconds > 0.0 else LATE[1]}
                continue
            except (MemoryError, RuntimeError, SpecError) as error:
                if not ((isinstance(error, SpecError) and name in PEERS) or is_out_of_memory(error)):
                    raise
                yield cell | {"reason": first_line(error)}
                free_memory(loaded.model.device)
                continue
            if plain is None and not name.startswith("plain"):
                yield cell | {"reason": "plain generate, which it is compared with, was left out"}
                continue
            plain, speed = plain or row, row["tokens_per_second"]
            theirs = max(theirs, speed) if name.startswith(("plain", "transformers")) else theirs
            compared = {"over_plain": speed / plain["tokens_per_second"], "over_theirs": speed / theirs}
            if IN_ORDER in name and name.startswith(ONE_TOKEN):
                ordered = row
            if name not in measured:
                other = (IN_ORDER in name and ordered) or plain
                num_equal = sum(map(str.__eq__, row["digests"], other["digests"]))
                yield cell | row | compared | {"equal": f"{num_equal} of {len(row['digests'])}"}


def _methods(loaded: LoadedModel, batch: int, length: int, chosen: Selection) -> dict[str, dict[str, Any]]:
    """Arguments of `generate` by the row's name, for texts that end with `length` tokens.

    transformers' assisted generation takes one sequence, and writes drafts after a static cache's usual end.
    """
    static = dict(STATIC)
    if chosen.compile_mode or chosen.compile_options:
        compile_config = CompileConfig(mode=chosen.compile_mode, options=dict(chosen.compile_options) or None)
        static["compile_config"] = compile_config
    anew = {"spec_config": {"pool": "request"}}  # the call is made twice: it must not be remembered
    rows: dict[str, dict[str, Any]] = {
        "plain, eager": {"spec_method": None},
        "plain, static cache": {"spec_method": None} | static,
    }
    if batch == 1:
        theirs: dict[str, dict[str, Any]] = {"transformers' prompt lookup": {"prompt_lookup_num_tokens": NUM_LOOKED_UP}}
        if loaded.assistant is not None:
            theirs["transformers' assistant"] = dict(loaded.assisted)
        rows |= {name: {"spec_method": None} | arguments for name, arguments in theirs.items()}
        if assists_static_caches():
            longer = static | {"max_cache_len": length + MAX_ASSISTED}
            rows |= {f"{name}, static cache": rows[name] | longer for name in theirs}
    ours: dict[str, dict[str, Any]] = {ONE_TOKEN: {"spec_method": "plain"}}
    ours |= {name: {"spec_method": name} for name in ("prompt_lookup", "lookahead")}
    ours["auto"] = {"spec_method": "auto"} | anew
    if loaded.assistant is not None:
        ours["draft_model"] = {"spec_method": "draft_model"} | loaded.assisted
    if loaded.head is not None:
        ours["eagle3"] = {"spec_method": "eagle3", "assistant_model": loaded.head}
        ours["auto+head"] = {"spec_method": "auto", "assistant_model": loaded.head} | anew
    ours |= {f"{name}, static cache": arguments | static for name, arguments in ours.items()}
    if batch == 1 and why_unordered(loaded.model.device) is None:
        ours |= {f"{name}{IN_ORDER}": ours[name] for name in (f"{ONE_TOKEN}, static cache", "auto, static cache")}
    if batch == 1 and loaded.processes is not None:
        ours |= {name: {} for name in PEERS}
    return rows | ours


@contextmanager
def _in_order(loaded: LoadedModel, name: str) -> Iterator[None]:
    """The model's forwards after the prompt have one width, and attention the order of the text, in rows so called."""
    if IN_ORDER not in name:
        yield
        return
    enable(loaded.model, plain_kernels=True)
    try:
        yield
    finally:
        enable(loaded.model, plain_kernels=False)


def _attention(backend: str | None) -> AbstractContextManager[None]:
    """One kind of attention kernel for all calls; graphs compiled in it keep that kind."""
    return nullcontext() if backend is None else sdpa_kernel(SDPBackend.__members__[backend.upper()])


def free_memory(device: torch.device) -> None:
    """Give back to the device what nothing refers to."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def is_out_of_memory(error: Exception) -> bool:
    """Tell errors of a device without room, or of the host, whose allocator has no error of its own."""
    return isinstance(error, torch.OutOfMemoryError | MemoryError) or "DefaultCPUAllocator" in str(error)
