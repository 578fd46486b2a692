"""`spec_method="dflash"`: the text of plain `generate`, drafts of transformers' own network, one forward a step."""

import dataclasses
import functools
from pathlib import Path
from typing import Any

import pytest
import torch

import hf_specdec
from hf_specdec.call.run import prepared_call
from hf_specdec.compat import num_weights
from hf_specdec.engine.head_pairing import head_runner_of, output_head
from hf_specdec.errors import ConfigError
from hf_specdec.forward.networks import head_base
from hf_specdec.kernels.cpu_kernels import CpuKernels
from hf_specdec.methods.common.draft_scorer import cost_ratio
from tests.helpers.head_models import draft_block, random_dflash, random_dflash_head
from tests.helpers.heads import SHAPES
from tests.helpers.heads import always as always_by
from tests.helpers.support import PROMPT, plain
from tests.helpers.zoo import FAMILIES, build

always = functools.partial(always_by, "dflash")


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_drafts_are_those_of_transformers_network_over_the_whole_text(model: Any, attention: str) -> None:
    """Each step's chain is what the network drafts with a cache made anew, windows included."""
    dflash = random_dflash(model)
    dflash.set_attn_implementation(attention)
    steps: list[Any] = []
    out = model.generate(
        PROMPT,
        max_new_tokens=14,
        do_sample=False,
        assistant_model=dflash,
        spec_observer=steps.append,
        **always({"num_branches": 1}),
    )
    with torch.no_grad():
        hidden = model(out, output_hidden_states=True).hidden_states
        length, compared = PROMPT.shape[1] + 1, 0
        for step in steps:
            drafted = draft_block(dflash, model, out[:, :length], hidden).argmax(-1)[0]
            depth = len(step.tree) - 1
            assert list(step.tree.tokens[1:]) == drafted[:depth].tolist()
            compared += depth
            length += len(step.accepted)
    assert length == out.shape[1]
    assert compared > 20


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
    for head, is_read in ((random_dflash(model), True), (random_dflash_head(model, kind="dspark"), False)):
        model.generate(PROMPT, **call, assistant_model=head, **always({}))
        assert any(module is model.lm_head for module in seen.pop().modules()) == is_read
    assert not seen


def test_a_forward_costs_what_the_targets_output_head_costs_too(model: Any) -> None:
    """As of MTP layers: a block's states are multiplied with it."""
    asked = {"spec_method": "plain", "input_ids": PROMPT, "max_new_tokens": 4}
    call = prepared_call(model, asked)[0]
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


def test_a_step_takes_one_forward_of_the_head_and_feeds_every_token_once(model: Any) -> None:
    dflash = random_dflash(model)
    fed: list[int] = []
    dflash.encoder.register_forward_pre_hook(lambda _, args: fed.append(args[0].shape[1]))
    steps: list[Any] = []
    out = model.generate(
        PROMPT,
        max_new_tokens=14,
        do_sample=False,
        assistant_model=dflash,
        spec_observer=steps.append,
        **always(SHAPES["tree"]),
    )
    assert len(fed) <= len(steps)
    assert sum(fed) <= out.shape[1] - 1


def test_auto_takes_it_as_one_more_source_from_its_folder(model: Any, tmp_path: Path) -> None:
    random_dflash(model).save_pretrained(tmp_path)
    head = hf_specdec.AutoDraftHead.from_pretrained(tmp_path)
    expected = plain(model, PROMPT, max_new_tokens=16, do_sample=False)
    config = {"num_nodes": 8, "pool": "request"}
    for how in ({"spec_method": "auto", "spec_config": config}, always({})):
        assert torch.equal(
            model.generate(PROMPT, max_new_tokens=16, do_sample=False, assistant_model=head, **how), expected
        )


def test_a_head_for_another_target_is_refused_with_both_sizes(model: Any) -> None:
    def generate(head: Any, method: str = "dflash") -> None:
        model.generate(PROMPT, max_new_tokens=4, spec_method=method, assistant_model=head)

    with pytest.raises(ConfigError, match=r"hidden_size 48, but is 'a head for 64'"):
        generate(random_dflash(model, hidden_size=64))
    with pytest.raises(ConfigError, match=r"number of layers 3, but is 'a head that reads \(1, 10\)'"):
        generate(random_dflash(model, target_layer_ids=[0, 9]))
    with pytest.raises(ConfigError, match=r"vocab_size 128, but is 'a head with mask_token_id 500'"):
        generate(random_dflash(model, mask_token_id=500))
    with pytest.raises(ConfigError, match=r'spec_method="dflash" for a head of this kind'):
        generate(random_dflash(model), "draft_model")
