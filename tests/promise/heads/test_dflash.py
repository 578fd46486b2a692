"""`spec_method="dflash"`: the text of plain `generate`, whatever the head."""

import dataclasses
import functools
from typing import Any

import pytest
import torch

from hf_specdec.call.generate import prepared_request
from hf_specdec.compat.models import num_weights
from hf_specdec.engine.head_pairing import head_runner_of, output_head
from hf_specdec.errors import ConfigError
from hf_specdec.forward.networks import head_base
from hf_specdec.kernels.cpu_kernels import CpuKernels
from hf_specdec.methods.common.draft_scorer import cost_ratio
from tests.helpers.head_models import random_dflash, random_dflash_head
from tests.helpers.heads import always as always_by
from tests.helpers.support import PROMPT, plain
from tests.helpers.zoo import FAMILIES, build

always = functools.partial(always_by, "dflash")


def test_its_logits_are_capped_as_the_targets_are() -> None:
    """A cap makes tokens more alike, which decides how far drafting goes on and what is drafted when sampling."""
    options = FAMILIES["gemma3"].options | {"final_logit_softcapping": 0.5}
    target = build(dataclasses.replace(FAMILIES["gemma3"], options=options))
    with torch.no_grad():
        out = target(PROMPT, output_hidden_states=True)
        torch.testing.assert_close(output_head(target)(out.hidden_states[-1]), out.logits)


def test_kernels_compute_the_targets_output_head_too(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the head has none: over its states it is the largest product of a block."""
    seen: list[Any] = []

    class Recorded(CpuKernels):
        def __init__(self, computing: Any, **kwargs: Any) -> None:
            seen.append(computing)
            super().__init__(computing, **kwargs)

    monkeypatch.setattr(head_base, "CpuKernels", Recorded)
    call: dict[str, Any] = {"max_new_tokens": 4, "do_sample": False}
    for head, is_read in (
        (random_dflash(model), True),
        (random_dflash_head(model, kind="dflash, reduced"), False),
    ):
        model.generate(PROMPT, **call, assistant_model=head, **always({}))
        assert any(module is model.lm_head for module in seen.pop().modules()) == is_read
    assert not seen


def test_a_forward_costs_what_the_targets_output_head_costs_too(model: Any) -> None:
    """As of MTP layers: a block's states are multiplied with it."""
    wanted = {"spec_method": "plain", "input_ids": PROMPT, "max_new_tokens": 4}
    call = prepared_request(model, wanted).call
    head = random_dflash_head(model, kind="dflash")
    cost = head_runner_of(call, head, budget=5, compiles=False).relative_cost
    weights = head.num_weights + model.lm_head.weight.numel()
    assert cost == cost_ratio((weights, num_weights(model)), (head.num_layers, model.config.num_hidden_layers))


def test_it_drafts_in_a_precision_of_its_own(model: Any) -> None:
    """The target's output head reads the target's precision."""
    options: dict[str, Any] = {"max_new_tokens": 8, "do_sample": False}
    head = random_dflash(model).bfloat16()
    ours = model.generate(PROMPT, **options, assistant_model=head, **always({"num_branches": 1}))
    assert torch.equal(ours, plain(model, PROMPT, **options))


def test_auto_takes_it_as_one_more_source(model: Any) -> None:
    head = random_dflash(model, sliding_window_non_causal=True)
    expected = plain(model, PROMPT, max_new_tokens=16, do_sample=False)
    config = {"num_nodes": 8, "pool": "request"}
    for how in ({"spec_method": "auto", "spec_config": config}, always({})):
        assert torch.equal(
            model.generate(PROMPT, max_new_tokens=16, do_sample=False, assistant_model=head, **how), expected
        )


def test_a_head_for_another_target_is_refused_with_both_sizes(model: Any) -> None:
    def generate(head: Any, method: str = "dflash") -> None:
        model.generate(PROMPT, max_new_tokens=4, spec_method=method, assistant_model=head)

    with pytest.raises(ConfigError, match="hidden_size 48, .*'a head for 64 and 128"):
        generate(random_dflash(model, target_hidden_size=64))
    with pytest.raises(ConfigError, match=r"and 3 layers, .* that reads the layers \(1, 10\)"):
        generate(random_dflash(model, aux_hidden_state_layer_ids=[1, 10]))
    with pytest.raises(ConfigError, match="vocab_size 128"):
        generate(random_dflash(model, mask_token_id=500))
    with pytest.raises(ConfigError, match=r'spec_method="dflash" for a head of this kind'):
        generate(random_dflash(model), "draft_model")
