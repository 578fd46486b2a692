"""What the engine does with one model of the wide zoo, compared with plain `generate`, and the page that lists it all.

finding = examine("qwen3_next", "causal")
python -m tests.capabilities.findings            # examine everything, rewrite docs/reference/architectures.md
"""

import dataclasses
import itertools
import logging
import math
import signal
import warnings
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from transformers import GenerationMixin
from transformers.utils import logging as transformers_logging

import hf_specdec
from hf_specdec.compat.caches import CACHE, contents
from tests.helpers.drafts import OracleDrafter, RandomTreeDrafter
from tests.helpers.zoo_wide import NEW_TOKENS, all_models, inputs, varied

__all__ = ["PAGE", "Finding", "Unbuilt", "examine", "listed", "page"]
PAGE = Path(__file__).parents[2] / "docs" / "reference" / "architectures.md"
SETTINGS: dict[str, Any] = {"max_new_tokens": NEW_TOKENS, "do_sample": False, "return_dict_in_generate": True}
SECONDS = 120  # for one model
HEAD = """# Architectures

What the engine does with every model class of transformers that generates. Each was tried on tiny random models in
fp32: of one prompt and of three prompts padded on the left, the greedy text and the cache with its keys, values and
states are compared with those of plain `generate`. Drafts come from prompt lookup, from `"auto"`, from random trees,
and from trees that hold the right tokens among wrong ones. The table is written by
`python -m tests.capabilities.findings`; a test compares it with what the models do.

- **tree**: any tree of tokens is verified in one forward. **chain**: several tokens in sequence are. **plain**: one
  token a forward, as without this package, for the reason given.
- **batch**: whether the rows of a padded batch are verified together, or decoded plainly.

A model is probed by itself, not looked up here; `hf-specdec info --model PATH` says what was found for yours.
"""
LIMITS = """
## Known limits

- A model that keeps the top few of its keys (`index_topk`, `keep_window_size`) may choose among equal scores
  differently when several tokens are computed at once. The probe finds ties among repeated tokens in a window of up to
  1024 tokens.
- Images and sound are read in the prompt's forward by transformers' own code; the table's multimodal models were given
  text alone, encoders of sound and images random features.
"""


@dataclasses.dataclass(frozen=True, slots=True)
class Finding:
    """One model class: its tier, whether batches are verified, and whether every text was plain generation's."""

    name: str
    model_type: str
    kind: str
    tier: str
    batch: str
    equal: bool
    reason: str
    num_accepted: int
    has_own_generate: bool

    @property
    def key(self) -> tuple[str, ...]:
        """What a test compares; reasons may hold figures that differ from machine to machine."""
        return self.name, self.tier, self.batch, "yes" if self.equal else "NO"

    @property
    def line(self) -> str:
        """Its line of the table."""
        return f"| {' | '.join((*self.key, self.reason.replace('|', '/')))} |"


@dataclasses.dataclass(frozen=True, slots=True)
class Unbuilt:
    """A model that the recipe cannot build or run, and why."""

    model_type: str
    kind: str
    why: str


def examine(model_type: str, kind: str) -> Finding:
    """Build the model, probe it, and compare every method on one prompt and on a batch."""
    model = varied(model_type, kind)
    hf_specdec.enable(model)
    result = hf_specdec.capability(model)
    equal, accepted, batch, reasons = True, 0, "yes", [result.reason] if result.tier != "tree" else []
    for rows in (1, 3):
        try:
            expected = model.__class__.generate(model, **inputs(model, rows=rows), **SETTINGS)
        except Exception as error:
            assert rows > 1, error
            batch = "no"
            reasons.append(f"plain generation of this batch fails ({type(error).__name__})")
            break
        for output in _speculated(model, rows, expected.sequences.tolist()):
            equal = equal and output.sequences.tolist() == expected.sequences.tolist()
            equal = equal and _caches_differ(output, expected) < 1e-3
            stats = getattr(output, "spec_stats", None)  # some models make an output of their own
            accepted += 1 if stats is None else stats.num_accepted_tokens
            if rows > 1 and stats is not None and stats.plain_reason:
                batch = "plain"
                reasons.append(stats.plain_reason)
    reason = "; ".join(dict.fromkeys(reasons))
    is_own = model.__class__.generate is not GenerationMixin.generate
    return Finding(type(model).__name__, model_type, kind, result.tier, batch, equal, reason, accepted, is_own)


def _caches_differ(output: Any, expected: Any) -> float:
    """The largest difference of what two outputs' caches hold, over the norm of a tensor; infinity for other shapes."""
    ours, wanted = [
        [item.double() for item in contents(getattr(result, CACHE, None)) if item.is_floating_point()]
        for result in (output, expected)
    ]
    if [item.shape for item in ours] != [item.shape for item in wanted]:
        return math.inf
    pairs = zip(ours, wanted, strict=True)
    return max((float((item - two).norm() / (two.norm() + 1e-9)) for item, two in pairs), default=0.0)


def _speculated(model: Any, rows: int, expected: list[list[int]]) -> Iterator[Any]:
    """The outputs of every method; where the model's `generate` is its own, texts are not those that drafters see."""
    is_own = model.__class__.generate is not GenerationMixin.generate
    for method in (_lookup, _auto) if is_own else (_lookup, _auto, _random_trees, _oracle):
        yield model.generate(**inputs(model, rows=rows), **SETTINGS, spec_method=method(expected))


def _lookup(expected: list[list[int]]) -> Any:
    return "prompt_lookup"


def _auto(expected: list[list[int]]) -> Any:
    return "auto"


def _random_trees(expected: list[list[int]]) -> Callable[[], RandomTreeDrafter]:
    texts = itertools.cycle(expected)
    return lambda: RandomTreeDrafter(next(texts), vocab_size=96)


def _oracle(expected: list[list[int]]) -> Callable[[], OracleDrafter]:
    texts = itertools.cycle(expected)
    return lambda: OracleDrafter(next(texts))


def listed() -> dict[str, tuple[str, ...]]:
    """The table's lines as the page has them: a model's name to its key."""
    cells = [line.strip("| ").split(" | ") for line in PAGE.read_text().splitlines() if line.startswith("| ")]
    return {row[0]: tuple(row[:4]) for row in cells if row[0] not in ("class", "---", "model type")}


def page(findings: Iterable[Finding], unbuilt: Iterable[Unbuilt]) -> str:
    """The whole page."""
    by_name = {finding.name: finding for finding in sorted(findings, key=lambda f: f.equal, reverse=True)}
    rows = sorted(by_name.values(), key=lambda finding: finding.name.lower())
    tiers = {tier: sum(finding.tier == tier for finding in rows) for tier in ("tree", "chain", "plain")}
    counts = ", ".join(f"{count} {tier}" for tier, count in tiers.items())
    lines = [HEAD, f"{len(rows)} classes: {counts}.", ""]
    lines += ["| class | tier | batch | equal | why not more |", "| --- | --- | --- | --- | --- |"]
    lines += [finding.line for finding in rows]
    lines += [
        "",
        "## Not tried",
        "",
        "The recipe builds no small model of these, or cannot give them what they read:",
        "",
    ]
    lines += [
        f"- `{item.model_type}` ({item.kind}): {item.why}" for item in sorted(unbuilt, key=lambda u: u.model_type)
    ]
    return "\n".join(lines) + "\n" + LIMITS


def examine_all() -> tuple[list[Finding], list[Unbuilt]]:
    """Every model of the wide zoo."""
    findings: list[Finding] = []
    unbuilt: list[Unbuilt] = []
    signal.signal(signal.SIGALRM, _too_long)
    for model_type, kind in all_models():
        signal.alarm(SECONDS)
        try:
            varied(model_type, kind)
        except Exception as error:
            unbuilt.append(Unbuilt(model_type, kind, f"{type(error).__name__}: {' '.join(str(error).split())[:90]}"))
            continue
        finally:
            signal.alarm(0)
        findings.append(examine(model_type, kind))
    return findings, unbuilt


def _too_long(*_: Any) -> None:
    raise TimeoutError("too slow for a test")


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    transformers_logging.set_verbosity_error()
    torch.set_num_threads(1)
    PAGE.write_text(page(*examine_all()))
