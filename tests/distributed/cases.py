"""What the processes of a tensor-parallel model are asked to do, and what one process makes of the same."""

import copy
import random
from collections.abc import Callable, Sequence
from typing import Any

import torch
from transformers import LogitsProcessor, LogitsProcessorList, StoppingCriteria, StoppingCriteriaList

from hf_specdec.common.tree import DraftTree, TreeBuilder
from tests.helpers.drafts import CheckedDrafter
from tests.helpers.head_models import random_dflash
from tests.helpers.heads import random_head
from tests.helpers.mtp import random_mtp_head
from tests.helpers.support import MASK, PADDED, PROMPT

__all__ = ["GRID", "HEADS", "ODD", "arguments", "seed_of"]
METHODS: dict[str, dict[str, Any]] = {
    "prompt_lookup": {"spec_method": "prompt_lookup"},
    "lookahead": {"spec_method": "lookahead", "spec_config": [4, 3, 5]},
    "draft_model": {"spec_method": "draft_model", "spec_config": {"num_branches": 2, "confidence_threshold": 0.0}},
    "use_logits": {"spec_method": "draft_model", "spec_config": {"use_logits": True, "confidence_threshold": 0.0}},
    "auto": {"spec_method": "auto", "spec_config": {"pool": "request"}},
    "plain": {"spec_method": "plain"},
    "static": {"spec_method": "prompt_lookup", "cache_implementation": "static"},
}
HEAD: dict[str, Any] = {"confidence_threshold": 0.0, "num_branches": 2, "draft_len": 3, "max_nodes": 6}
HEADS: dict[str, Callable[[Any], Any]] = {"eagle3": random_head, "dflash": random_dflash, "mtp": random_mtp_head}
METHODS |= {name: {"spec_method": name, "spec_config": HEAD} for name in HEADS}
PLACES = {
    "draft_model": ("whole", "shared"),
    "use_logits": ("whole", "shared"),
    "auto": ("none", "shared"),
}
# (family, method, batch, sampled, where the draft model is)
GRID = [
    ("llama", method, batch, sampled, place)
    for method in (name for name in METHODS if name not in HEADS)
    for batch in (1, 3)
    for sampled in (False, True)
    for place in PLACES.get(method, ("none",))
] + [
    (family, method, batch, sampled, "shared" if method == "draft_model" else "none")
    for family in ("qwen3", "mixtral")
    for method in ("prompt_lookup", "draft_model")
    for batch, sampled in ((1, False), (3, True))
]
GRID += [
    ("glm" if method == "mtp" else "llama", method, batch, sampled, "head")
    for method in HEADS
    for batch, sampled in ((1, False), (3, True))
]


class AtLength(StoppingCriteria):
    """Stops at a length of the rank's own, as clocks do that do not agree."""

    def __init__(self, length: int) -> None:
        self.length = length

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> Any:
        return torch.full((len(input_ids),), input_ids.shape[1] >= self.length, device=input_ids.device)


class Noise(LogitsProcessor):
    """Adds noise of the rank's own."""

    def __init__(self, seed: int) -> None:
        self.generator = torch.Generator().manual_seed(seed)

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        return scores + torch.randn(scores.shape, generator=self.generator).to(scores.device)


class Raising(LogitsProcessor):
    """Raises at the third token."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        if self.calls == 3:
            raise LookupError("no such word")
        return scores


class Guessing(CheckedDrafter):
    """Drafts tokens that no one else would, in trees of any size."""

    def __init__(self, seed: int) -> None:
        super().__init__([])
        self.random = random.Random(seed)

    def begin(self, prompt_ids: Sequence[int]) -> None:
        self.text = list(prompt_ids)

    def observe(self, tree: DraftTree, logits: torch.Tensor | None, accepted: Sequence[int]) -> None:
        self.text += accepted

    def grow(self, builder: TreeBuilder, budget: int) -> None:
        for _ in range(min(self.random.randrange(12), budget)):
            builder.add(self.random.randrange(len(builder)), self.random.randrange(128))


def _raise(step: Any) -> None:
    raise KeyError("observer")


def _processors(rank: int, which: int) -> dict[str, Any]:
    return {"logits_processor": LogitsProcessorList([Raising()])} if rank == which else {}


# What each rank is asked, by its number; `None` is the one process of the comparison.
ODD: dict[str, Callable[[int], dict[str, Any]]] = {
    "drafters that differ": lambda rank: {"spec_method": lambda: Guessing(rank)},
    "clocks that differ": lambda rank: {"stopping_criteria": StoppingCriteriaList([AtLength(40 - 3 * rank)])},
    "noise that differs": lambda rank: {"logits_processor": LogitsProcessorList([Noise(rank)])},
    "plain with clocks": lambda rank: {
        "stopping_criteria": StoppingCriteriaList([AtLength(36 + rank)]),
        "input_ids": PADDED,
        "attention_mask": MASK,
        "do_sample": True,
    },
    "prompts that differ": lambda rank: {"input_ids": PROMPT.roll(rank)},
    "lengths that differ": lambda rank: {"input_ids": PROMPT[:, rank:]},
    "methods that differ": lambda rank: {"spec_method": "prompt_lookup" if rank else "lookahead"},
    "an error in the first": lambda rank: _processors(rank, 0),
    "an error in the second, which no one asks": lambda rank: _processors(rank, 1),
    "an error in an observer": lambda rank: {"spec_observer": _raise} if rank else {},
    "all is well again": lambda rank: {},
}


def seed_of(rank: int) -> int:
    """No two processes share a seed."""
    return 5 + 100 * rank


def arguments(case: Any, rank: int) -> dict[str, Any]:
    """Arguments of `generate` for one rank, but for the draft model."""
    kwargs: dict[str, Any] = {"max_new_tokens": 14, "do_sample": False, "input_ids": PROMPT}
    if isinstance(case, str):
        return kwargs | {"spec_method": "prompt_lookup"} | ODD[case](rank)
    _, method, batch, sampled, _ = case
    kwargs |= {"do_sample": sampled, **copy.deepcopy(METHODS[method])}
    return kwargs if batch == 1 else kwargs | {"input_ids": PADDED, "attention_mask": MASK}
