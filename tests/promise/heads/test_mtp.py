"""`spec_method="mtp"`: the text of plain `generate` with any MTP layers, drafts of transformers' own network."""

import copy
import functools
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers.cache_utils import MtpCache
from transformers.modeling_layers import MtpModel

import hf_specdec
from hf_specdec.errors import CheckpointError, ConfigError, UnsupportedModelError
from hf_specdec.methods.mtp.network import MtpHead
from tests.helpers.heads import SHAPES, random_head
from tests.helpers.heads import always as always_by
from tests.helpers.mtp import TARGETS, build_target, fitted_mtp, random_mtp, save_checkpoint
from tests.helpers.support import PROMPT, plain

always = functools.partial(always_by, "mtp")


@pytest.fixture(scope="module", params=list(TARGETS))
def pair(request: pytest.FixtureRequest) -> tuple[Any, MtpModel]:
    model = build_target(request.param)
    return model, random_mtp(model)


@pytest.fixture(scope="module")
def mellum() -> tuple[Any, MtpModel]:
    model = build_target("mellum, sliding")
    return model, random_mtp(model)


@pytest.mark.at_most(2)
def test_drafts_are_those_of_transformers_layers_over_the_whole_text(pair: tuple[Any, MtpModel]) -> None:
    """Each step's chain is what `MtpModel` drafts with caches made anew, however many layers there are."""
    model, mtp = pair
    steps: list[Any] = []
    num_layers = len(mtp.layers)
    out = model.generate(
        PROMPT,
        max_new_tokens=12,
        do_sample=False,
        assistant_model=MtpHead(mtp),
        spec_observer=steps.append,
        **always({"num_branches": 1, "draft_len": num_layers}),
    )
    with torch.no_grad():
        hidden = model(out, output_hidden_states=True).hidden_states[-1]
    length = PROMPT.shape[1] + 1
    compared = 0
    for step in steps:
        with torch.no_grad():
            drafted, _, _ = mtp(
                input_ids=out[:, 1:length],
                last_hidden_states=hidden[:, : length - 1],
                attention_mask=None,
                position_ids=torch.arange(1, length)[None],
                mtp_cache=MtpCache(config=mtp.config),
            )
        depth = len(step.tree) - 1
        assert list(step.tree.tokens[1:]) == drafted[0, :depth].tolist()
        compared += depth
        length += len(step.accepted)
    assert length == out.shape[1]
    assert compared > 0


@pytest.mark.wide
def test_the_last_layer_drafts_what_lies_beyond_the_layers() -> None:
    """One layer, five tokens a step; more of them are accepted than of one token a step."""
    model = build_target("glm4_moe, 1 layer")
    expected = plain(model, PROMPT, max_new_tokens=32, do_sample=False)
    mtp = fitted_mtp(model, expected, rounds=3)
    tokens_per_step = []
    for draft_len in (1, 5):
        ours = model.generate(
            PROMPT,
            max_new_tokens=32,
            do_sample=False,
            assistant_model=MtpHead(mtp),
            return_dict_in_generate=True,
            **always({"draft_len": draft_len}),
        )
        assert torch.equal(ours.sequences, expected)
        tokens_per_step.append(ours.spec_stats.mean_acceptance_length)
    assert tokens_per_step[0] <= 2.0 < tokens_per_step[1]


def test_every_token_is_fed_once_and_every_level_takes_one_forward_of_one_layer() -> None:
    model = build_target("glm4_moe, 3 layers")
    mtp = random_mtp(model)
    columns: list[tuple[int, int]] = []
    for index, layer in enumerate(mtp.layers):
        layer.register_forward_pre_hook(lambda _, args, index=index: columns.append((index, args[0].shape[1])))
    steps: list[Any] = []
    options: dict[str, Any] = {"max_new_tokens": 16, "do_sample": False, "spec_observer": steps.append}
    out = model.generate(PROMPT, assistant_model=MtpHead(mtp), **options, **always({"num_branches": 1, "draft_len": 3}))
    of_layer = [[width for index, width in columns if index == layer] for layer in range(3)]
    for layer, widths in enumerate(of_layer):
        assert len(widths) <= len(steps) + 1  # and one token to find the shapes of the cache
        drafted = layer * len(steps)
        assert sum(widths) <= out.shape[1] + 1 + drafted


def test_the_layers_are_read_from_the_targets_checkpoint(mellum: tuple[Any, MtpModel], tmp_path: Path) -> None:
    save_checkpoint(*mellum, tmp_path)
    model = hf_specdec.AutoModelForCausalLM.from_pretrained(tmp_path, precision="fp32")
    expected = plain(model, PROMPT, max_new_tokens=8, do_sample=False)
    options: dict[str, Any] = {"max_new_tokens": 8, "do_sample": False, "return_dict_in_generate": True}
    steps: list[list[Any]] = [[], []]
    ours = model.generate(PROMPT, **options, spec_observer=steps[0].append, **always(SHAPES["chain"]))
    inputs = mellum[0].generate(
        PROMPT, assistant_model=MtpHead(mellum[1]), **options, spec_observer=steps[1].append, **always(SHAPES["chain"])
    )
    assert torch.equal(ours.sequences, expected)
    assert torch.equal(inputs.sequences, expected)
    assert [step.tree.tokens for step in steps[0]] == [step.tree.tokens for step in steps[1]]
    for dtype in (None, torch.bfloat16, torch.float64):  # the target's output head reads the target's precision
        head = hf_specdec.AutoDraftHead.from_pretrained(tmp_path, target=model, dtype=dtype)
        for how in (always(SHAPES["chain"]), {"spec_method": "auto"}):
            assert torch.equal(model.generate(PROMPT, **options, **how, assistant_model=head)[0], expected)
    copied = copy.deepcopy(model)
    assert torch.equal(copied.generate(PROMPT, **options, spec_method="mtp").sequences, expected)


def test_a_model_without_mtp_layers_is_refused(model: Any, tmp_path: Path) -> None:
    with pytest.raises(
        UnsupportedModelError, match="LlamaForCausalLM must be a model with MTP layers that can be read here"
    ):
        model.generate(PROMPT, max_new_tokens=4, spec_method="mtp")
    announced = build_target("glm4_moe, 1 layer")
    with pytest.raises(CheckpointError, match="checkpoint with the MTP layers of Glm4MoeForCausalLM"):
        announced.generate(PROMPT, max_new_tokens=4, spec_method="mtp")
    announced.save_pretrained(tmp_path)  # as transformers saves it, without them
    with pytest.raises(CheckpointError, match=r"MTP layers.*original checkpoint"):
        hf_specdec.AutoDraftHead.from_pretrained(tmp_path, target=announced)
    assert announced.config.name_or_path == ""


def test_layers_of_another_model_and_other_heads_are_refused(mellum: tuple[Any, MtpModel]) -> None:
    model, mtp = mellum
    other = MtpHead(copy.deepcopy(mtp))
    other.target_hidden_size = 64
    with pytest.raises(ConfigError, match="hidden_size 48, .*'a head for 64 and"):
        model.generate(PROMPT, max_new_tokens=4, spec_method="mtp", assistant_model=other)
    with pytest.raises(ConfigError, match=r'spec_method="mtp" for a head of this kind'):
        model.generate(PROMPT, max_new_tokens=4, spec_method="eagle3", assistant_model=MtpHead(mtp))
    with pytest.raises(ConfigError, match=r'spec_method="eagle3" for a head of this kind'):
        model.generate(PROMPT, max_new_tokens=4, spec_method="mtp", assistant_model=random_head(model))
    for no_head in (model, mtp):
        with pytest.raises(ConfigError, match="must be a draft head"):
            model.generate(PROMPT, max_new_tokens=4, spec_method="mtp", assistant_model=no_head)
