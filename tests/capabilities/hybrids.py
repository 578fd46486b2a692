"""Speeds of hybrid models with drafts, and the page that lists them.

python -m tests.capabilities.hybrids RECORDS.jsonl     # measures what the file lacks, then writes the page
"""

import contextlib
import copy
import functools
import json
import random
import re
import statistics
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import torch

import hf_specdec
from hf_specdec.cache.recurrent_state import contents
from hf_specdec.common.tree import TreeBuilder
from hf_specdec.compat import state_layers
from hf_specdec.compat.caches import CACHE
from hf_specdec.forward.text_rows import TreeLayout
from tests.helpers.drafts import CheckedDrafter
from tests.helpers.support import plain
from tests.helpers.zoo_wide import VOCAB_SIZE, build, shrunk

PAGE = Path(__file__).parents[2] / "docs" / "reference" / "hybrids.md"
NAMES = "qwen3_next lfm2 nemotron_h falcon_h1 granitemoehybrid mamba2 kimi_linear qwen3_5 zamba2".split()
NAMES += "bailing_hybrid minimax".split()
WIDENED = re.compile(
    r"(moe_|shared_expert_|attention_)?(hidden_size|intermediate_size)|(mamba_)?d_ssm|\w*dt_rank|time_step_rank|"
    r"(num_|n_|mamba_n_|n_mamba_|mamba_num_|linear_num_)?(attention_|key_|value_|mamba_)?heads"
)
CALL: dict[str, Any] = {"max_new_tokens": 64, "do_sample": False, "return_dict_in_generate": True}
ROUNDS, SECONDS = 3, 0.02
IDS = (torch.arange(48) % 12 + 5)[None]
HEAD = """# Hybrid models

Models with recurrent or convolution states: tiny configurations widened until a forward of one token takes 20 ms of
processor time on one thread of a busy machine, or the widest that was tried; random weights, fp32, 64 tokens. A speed
is the processor time of plain `generate` over that with drafts, the median of three runs in turns. Written by
`python -m tests.capabilities.hybrids RECORDS.jsonl`; every text equals that of plain `generate`.

- **known drafts**: chains of four tokens, each right two times in three. **copied**: the same where states are copied
  before a draft and put back after a rejection, as of layers that are not known.
- **computed**: tokens in forwards of the model for each token kept, with known drafts; **again** of these were computed
  before, and in brackets with copied states.
- **prompt lookup**, **auto**: of the same texts, which seldom repeat themselves (Mamba-2's does).
- **states**: of one sequence.

| model | tier | forward | tokens per step | computed | again | known drafts | copied | prompt lookup | auto | states |
| --- | --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |
"""


class KnownDrafter(CheckedDrafter):
    """Drafts chains of four tokens, each right two times in three."""

    def grow(self, builder: TreeBuilder, budget: int) -> None:
        draws, node = random.Random(len(self.text)), 0
        for token in self.coming[: min(budget, 4)]:
            node = builder.add(node, token if draws.random() < 2 / 3 else (token + 1) % VOCAB_SIZE)


def widened(name: str) -> tuple[Any, float]:
    """A model, and the seconds of processor time of its forward of one token."""
    result: tuple[Any, float] = (None, 0.0)
    for factor in (8, 12, 16, 24, 32, 48):
        config = shrunk(name)
        text = config.get_text_config()
        before = text.to_dict()
        for key, value in before.items():
            is_latent = key == "num_key_value_heads" and value == before["num_attention_heads"]
            if type(value) is int and (is_latent or WIDENED.fullmatch(key)):
                setattr(text, key, value * factor)
        model = build(text, "causal", 0.15 / factor**0.5)
        with torch.no_grad():
            cache = model(IDS, use_cache=True)[CACHE]
            step = functools.partial(model, IDS[:, :1], **{CACHE: cache}, use_cache=True)
            times = []
            for _ in range(7):
                start = time.process_time()
                step()
                times.append(time.process_time() - start)
        result = model, statistics.median(times)
        if result[1] >= SECONDS:
            break
    return result


def measure(name: str) -> dict[str, Any]:
    """One line of the page, as it is kept."""
    model, seconds = widened(name)
    ours, copied = hf_specdec.enable(model), hf_specdec.enable(copy.deepcopy(model))
    times: dict[str, list[float]] = {name: [] for name in ("plain", "known", "copied", "prompt_lookup", "auto")}
    again, outputs = {}, {}
    for number in range(ROUNDS + 1):  # the first is not counted
        ids = IDS + number
        for run, taken in times.items():
            with _unknown_layers() if run == "copied" else contextlib.nullcontext(), _watched() as refed:
                start = time.process_time()
                if run == "plain":
                    outputs[run] = plain(ours, ids, **CALL)
                elif run in ("known", "copied"):
                    drafter = functools.partial(KnownDrafter, outputs["plain"].sequences[0].tolist())
                    outputs[run] = (ours if run == "known" else copied).generate(ids, **CALL, spec_method=drafter)
                else:
                    outputs[run] = ours.generate(ids, **CALL, spec_method=run)
                taken.append(time.process_time() - start)
            again[run] = refed[0]
            assert outputs[run].sequences.tolist() == outputs["plain"].sequences.tolist()
    medians = {name: statistics.median(taken[1:]) for name, taken in times.items()}
    stats, layers = outputs["known"].spec_stats, outputs["plain"][CACHE].layers
    states = [getattr(layer, kind, None) for layer in layers for kind in ("conv_states", "recurrent_states")]
    return {
        "model": model.__class__.__name__,
        "tier": stats.tier,
        "ms": 1e3 * seconds,
        "tokens": stats.mean_acceptance_length,
        "computed": (stats.num_forwards + stats.num_draft_tokens + again["known"]) / stats.num_tokens,
        "again": again["known"],
        "copied_again": again["copied"],
        "speeds": {name: medians["plain"] / taken for name, taken in medians.items()},
        "state_bytes": sum(tensor.nbytes for state in states for tensor in contents(state)),
    }


@contextlib.contextmanager
def _unknown_layers() -> Iterator[None]:
    with mock.patch.object(state_layers, "known_state_layers", lambda model: ()):
        yield


@contextlib.contextmanager
def _watched() -> Iterator[list[int]]:
    """Counts tokens that forwards compute again."""
    again, begin = [0], TreeLayout.__init__

    def watch(self: TreeLayout, pending: Any, *args: Any, **kwargs: Any) -> None:
        again[0] += len(pending)
        begin(self, pending, *args, **kwargs)

    with mock.patch.object(TreeLayout, "__init__", watch):
        yield again


def page(records: list[dict[str, Any]]) -> str:
    """The whole page."""
    lines = []
    for item in sorted(records, key=lambda item: item["model"]):
        speeds = " | ".join(f"{item['speeds'][run]:.2f}" for run in ("known", "copied", "prompt_lookup", "auto"))
        lines.append(
            f"| {item['model']} | {item['tier']} | {item['ms']:.0f} ms | {item['tokens']:.1f} | "
            f"{item['computed']:.2f} | {item['again']} ({item['copied_again']}) | {speeds} | "
            f"{item['state_bytes'] / 1024:.0f} KB |"
        )
    return HEAD + "\n".join(lines) + "\n"


if __name__ == "__main__":
    torch.set_num_threads(1)
    file = Path(sys.argv[1])
    kept = {one["name"]: one for one in map(json.loads, file.read_text().splitlines())} if file.exists() else {}
    for name in NAMES:
        if name not in kept:
            kept[name] = {"name": name, **measure(name)}
            with file.open("a") as opened:
                opened.write(json.dumps(kept[name]) + "\n")
    PAGE.write_text(page(list(kept.values())))
