"""The models of `hf-specdec bench`: every `--model` at every `--widen`."""

import itertools
import sys
from collections.abc import Sequence
from pathlib import Path

from transformers import logging

from hf_specdec.bench.subject import Subject, load_subject, pick_device
from hf_specdec.bench.widen import read_size
from hf_specdec.cli.inputs import set_threads
from hf_specdec.cli.report import note

__all__ = ["NATIVE", "load_subjects", "look_here"]

NATIVE = "native"


def load_subjects(
    paths: Sequence[str] | None,
    sizes: Sequence[str] | None,
    *,
    dtype: str | None = None,
    device: str | None = None,
    draft_model: str | None = None,
    draft_dtype: str | None = None,
    attn_implementation: str | None = None,
    threads: int | None = None,
) -> list[Subject]:
    """Every model at every size, each once; without paths the embedded target, without sizes each at its own."""
    logging.disable_progress_bar()
    wanted = list(dict.fromkeys(None if size == NATIVE else read_size(size) for size in sizes or [NATIVE]))
    models: list[str | None] = [*dict.fromkeys(paths or ())] or [None]
    where = pick_device(device)
    if threads is not None or where.type == "cpu":
        set_threads(None, threads)
    subjects = []
    for path, size in itertools.product(models, wanted):
        subject = load_subject(
            path,
            dtype=dtype,
            device=where,
            assistant=draft_model,
            assistant_dtype=draft_dtype,
            widen_to=size,
            attn_implementation=attn_implementation,
        )
        if size is not None:
            of = f"{subject.name}: " if len(models) > 1 else ""
            difference = subject.facts["widening"]["largest_logit_difference"]
            note(f"{of}widened to {size[0]}x{size[1]}: largest difference of the logits {difference:.1e}", "dim")
        subjects.append(subject)
    return subjects


def look_here() -> None:
    """Let `module:Class` name a module in the current folder."""
    if str(Path.cwd()) not in sys.path:
        sys.path.insert(0, str(Path.cwd()))
