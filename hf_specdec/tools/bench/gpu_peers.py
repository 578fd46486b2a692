"""Rows of other libraries on a GPU, over their static caches and CUDA graphs, each library in a process of its own.

They load the model from a folder; one that was widened in memory is saved for them.
"""

import contextlib
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from fnmatch import fnmatchcase
from typing import Any

import torch

from hf_specdec.errors import SpecError
from hf_specdec.kernels.quantization.report import precision_of
from hf_specdec.loading import embedded
from hf_specdec.tools.bench.gpu_rows import TimeUp, digest_of
from hf_specdec.tools.bench.loaded_model import EMBEDDED_DRAFT, LoadedModel
from hf_specdec.tools.bench.peers.process import Processes

# The library, its row and its options by the row's name here; flashspec has graphs on GPUs unless it is told otherwise.
ROWS: Mapping[str, tuple[str, str, Mapping[str, Any]]] = {
    "economize:lookup": ("economize", "lookup", {"cuda_graphs": True}),
    "economize:draft_model": ("economize", "draft_model", {"cuda_graphs": True}),
    "flashspec:lookup": ("flashspec", "lookup", {}),
    "flashspec:composite": ("flashspec", "composite", {}),
}


def names_peers(patterns: Sequence[str]) -> bool:
    """Returns whether shell patterns of rows name one of other libraries."""
    return any(fnmatchcase(name, pattern) for pattern in patterns for name in ROWS)


@contextlib.contextmanager
def with_peers(loaded: LoadedModel, pythons: Mapping[str, str], *, draft: str | None = None) -> Iterator[LoadedModel]:
    """The model with processes of other libraries, whose texts do not end before their length.

    Args:
        pythons: interpreters by library; this one by default.
        draft: folder of the draft model that the libraries load; the embedded one where that is the assistant.
    """
    with tempfile.TemporaryDirectory() as folder:
        loaded.model.save_pretrained(folder)
        if draft is None and loaded.assistant_name == EMBEDDED_DRAFT:
            draft = embedded.path("draft")
        setup: dict[str, Any] = {"model": folder, "draft": draft, "head": None, "eos": []}
        setup |= {"dtype": precision_of(loaded.model), "device": str(loaded.device), "threads": torch.get_num_threads()}
        yield replace(loaded, processes=Processes(pythons, setup))


def measure_peer(
    processes: Processes, name: str, texts: Sequence[Mapping[str, torch.Tensor]], max_new_tokens: int
) -> dict[str, Any]:
    """A row as `measure_row` has it, as far as a library tells; the first text is written twice.

    Raises:
        SpecError: the library is not there, or has failed.
    """
    library, row, options = ROWS[name]
    process = processes.of_row(library, row)

    def ask(inputs: Mapping[str, torch.Tensor], count: int) -> dict[str, Any]:
        call = {"row": row, "options": dict(options), "sampling": None, "seed": 0, "is_watched": False, "is_kept": True}
        answer = process.ask(call | {"ids": inputs["input_ids"].tolist(), "max_new_tokens": count})
        if "error" in answer:
            raise SpecError(f"{name}: {answer['error']}")
        return answer

    try:
        first = [ask(texts[0], max_new_tokens) for _ in range(2)]
        others = [ask(inputs, max_new_tokens) for inputs in texts[1:]]
        prompts = [ask(inputs, 1)["seconds"] for inputs in texts[1:]]
    except TimeUp:
        processes.end(library)  # whose answer the next row would take for its own
        raise
    seconds, num_tokens = (sum(call["seconds"] for call in others), sum(len(call["token_ids"][0]) for call in others))
    later = seconds / len(others) - sum(prompts) / len(prompts)
    return {
        "tokens_per_second": num_tokens / seconds,
        "later_token_ms": 1000 * max(later, 0.0) / max(max_new_tokens - 1, 1),
        "first_call_seconds": first[0]["seconds"],
        "mean_acceptance_length": None,
        "num_graphs": None,
        "plain_reason": None,
        "peak_gigabytes": None,
        "digests": [digest_of(call["token_ids"]) for call in [first[0], *others]],
    }
