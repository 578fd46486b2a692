"""`auto` that weighs costs: the first call learns them while it decodes, and gives the tokens of plain generate."""

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch

import hf_specdec
from hf_specdec.engine.cost.cost_model import SIZES
from hf_specdec.engine.model_state import state_of
from tests.helpers.cover import wide_but
from tests.helpers.support import PROMPT, count_forwards, plain, speculative
from tests.helpers.zoo import BASE, FAMILIES, Family, build

MAMBA2 = BASE | {"hidden_size": 64, "num_heads": 4, "head_dim": 32, "state_size": 16, "n_groups": 1, "chunk_size": 16}
KEPT = Family(name="mamba2", config="Mamba2Config", options=MAMBA2, tier="chain", seed=3)
SAMPLED = {"do_sample": True, "temperature": 0.8, "top_k": 30}
BATCH = {
    "input_ids": torch.cat([PROMPT, PROMPT.roll(4, dims=1), PROMPT.roll(9, dims=1)]),
    "attention_mask": torch.ones(3, 30, dtype=torch.long),
}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama, sampled": ("llama", SAMPLED),
    "llama, batch of 3": ("llama", BATCH),
    "llama, static cache": ("llama", {"cache_implementation": "static"}),
    "gemma3, window": ("gemma3", {}),
    "t5": ("t5", {}),
    "mamba2, kept state": ("mamba2", {}),
    "mamba2, sampled": ("mamba2", SAMPLED),
}
LEARNT = ("llama", "llama, sampled", "llama, batch of 3", "llama, static cache", "mamba2, sampled")


def learned(model: Any) -> list[list[int]]:
    """Sizes of forwards whose costs are known, for each number of rows."""
    curves = [curve for costs in state_of(model).costs.values() for curve in costs._curves.values()]
    return [[size for size, count in zip(SIZES, curve.counts, strict=True) if count] for curve in curves]


def fresh(family: str) -> Any:
    """An enabled model that nothing was measured on."""
    return hf_specdec.enable(build(KEPT if family == "mamba2" else FAMILIES[family]))


def generate(model: Any, make: Callable[..., Any] = speculative, **kwargs: Any) -> Any:
    torch.manual_seed(11)
    inputs = {"input_ids": PROMPT, "max_new_tokens": 80, "do_sample": False, "return_dict_in_generate": True}
    return make(model, **{**inputs, **kwargs})


@pytest.mark.at_most(1)
@pytest.mark.parametrize("name", wide_but(LEARNT, CASES))
def test_the_call_that_learns_the_costs_gives_plain_generates_tokens(name: str) -> None:
    family, how = CASES[name]
    model = fresh(family)
    reference = generate(model, plain, **how).sequences
    ours = generate(model, spec_method="auto", **how)
    assert ours.sequences.tolist() == reference.tolist()
    assert ours.spec_stats.plain_reason is None
    assert max(map(len, learned(model))) >= 2
    assert generate(model, spec_method="auto", **how).sequences.tolist() == reference.tolist()


def test_no_forward_is_computed_to_find_out_what_it_costs() -> None:
    """As many forwards as steps, and the prompt's; the probe has seen the hook that counts."""
    model = fresh("llama")
    with count_forwards(model) as forwards:
        hf_specdec.capability(model)
        probed = forwards.calls
        stats = generate(model, spec_method="auto").spec_stats
    assert forwards.calls - probed == stats.num_forwards + 1


@pytest.mark.at_most(1)
@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_copies_keep_the_costs_they_know(duplicate: Callable[..., Any]) -> None:
    model = fresh("llama")
    reference = generate(model, spec_method="auto").sequences
    other = duplicate(model)
    assert learned(other) == learned(model)
    assert generate(other, spec_method="auto").sequences.tolist() == reference.tolist()
    (mine,), (theirs,) = (state_of(item).costs.values() for item in (model, other))
    assert theirs is not mine


def test_forwards_over_static_caches_have_costs_of_their_own() -> None:
    """Compiled, they may take a quarter of the time."""
    model = fresh("llama")
    for cache in ({}, {"cache_implementation": "static"}, {}):
        generate(model, spec_method="auto", disable_compile=True, **cache)
    assert len(state_of(model).costs) == 2
