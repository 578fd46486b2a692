"""`spec_method="mtp"`: the text of plain `generate` with any MTP layers, drafts of transformers' own network."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers.cache_utils import MtpCache
from transformers.modeling_layers import MtpModel

import hf_specdec
from hf_specdec.errors import CheckpointError, ConfigError, UnsupportedModelError
from tests.helpers.heads import random_head
from tests.helpers.mtp import TARGETS, build_target, fitted_mtp, random_mtp, save_checkpoint
from tests.helpers.support import PROMPT, plain

SHAPES = {"chain": {"num_branches": 1, "draft_len": 5}, "tree": {"num_branches": 3, "draft_len": 4, "max_nodes": 9}}
BATCH = torch.tensor([[0, 0, 5, 6, 7, 8], [9, 10, 11, 12, 13, 14], [0, 0, 0, 0, 21, 22]])
INPUTS: dict[str, dict[str, Any]] = {
    "one prompt": {"input_ids": PROMPT},
    "padded batch": {"input_ids": BATCH, "attention_mask": (BATCH != 0).long()},
}
MODES: dict[str, dict[str, Any]] = {
    "greedy": {"do_sample": False},
    "sampled": {"do_sample": True, "temperature": 0.8, "top_k": 30},
}
CACHES: dict[str, dict[str, Any]] = {
    "dynamic": {},
    "static": {"cache_implementation": "static", "disable_compile": True},
}


@pytest.fixture(scope="module", params=list(TARGETS))
def pair(request: pytest.FixtureRequest) -> tuple[Any, MtpModel]:
    model = build_target(request.param)
    return model, random_mtp(model)


@pytest.fixture(scope="module")
def mellum() -> tuple[Any, MtpModel]:
    model = build_target("mellum, sliding")
    return model, random_mtp(model)


def always(config: dict[str, Any]) -> dict[str, Any]:
    """Drafts at every step, whatever was accepted before."""
    return {"spec_method": "mtp", "spec_config": {"confidence_threshold": 0.0, **config}}


@pytest.mark.pairwise
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("cache", CACHES)
@pytest.mark.parametrize("inputs", INPUTS)
def test_greedy_text_is_that_of_plain_generation(
    pair: tuple[Any, MtpModel], inputs: str, cache: str, shape: str
) -> None:
    model, mtp = pair
    options = {"max_new_tokens": 12, "do_sample": False, **INPUTS[inputs], **CACHES[cache]}
    ours = model.generate(**options, assistant_model=mtp, return_dict_in_generate=True, **always(SHAPES[shape]))
    assert torch.equal(ours.sequences, plain(model, **options))
    assert ours.spec_stats.num_draft_tokens > 0


@pytest.mark.each_value
@pytest.mark.parametrize("cache", CACHES)
def test_a_seed_gives_the_text_that_it_gives_without_drafts(pair: tuple[Any, MtpModel], cache: str) -> None:
    model, mtp = pair
    options = {"max_new_tokens": 12, **MODES["sampled"], **INPUTS["one prompt"], **CACHES[cache]}
    for seed in range(2):
        torch.manual_seed(seed)
        expected = plain(model, **options)
        torch.manual_seed(seed)
        assert torch.equal(model.generate(**options, assistant_model=mtp, **always(SHAPES["tree"])), expected)


@pytest.mark.each_value
@pytest.mark.parametrize("cache", CACHES)
def test_rows_of_a_sampled_batch_are_those_of_the_method_without_drafts(pair: tuple[Any, MtpModel], cache: str) -> None:
    """Each row of a batch has a generator of its own, so a row's text is a function of its seed alone."""
    model, mtp = pair
    options = {"max_new_tokens": 10, **MODES["sampled"], **INPUTS["padded batch"], **CACHES[cache]}
    texts = []
    for how in ({"spec_method": "plain"}, {"assistant_model": mtp, **always(SHAPES["tree"])}):
        torch.manual_seed(5)
        texts.append(model.generate(**options, **how))
    assert torch.equal(texts[0], texts[1])


def test_drafts_are_those_of_transformers_layers_over_the_whole_text(pair: tuple[Any, MtpModel]) -> None:
    """Each step's chain is what `MtpModel` drafts with caches made anew, however many layers there are."""
    model, mtp = pair
    steps: list[Any] = []
    num_layers = len(mtp.layers)
    out = model.generate(
        PROMPT,
        max_new_tokens=12,
        do_sample=False,
        assistant_model=mtp,
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


@pytest.mark.parametrize("name", ["glm4_moe, 1 layer", "glm4_moe, 3 layers"])
def test_as_many_drafts_are_accepted_as_in_transformers_own_loop(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Layers that were fitted to the text, the same prompt and length: fewer forwards of the target, or as many."""
    model = build_target(name)
    options: dict[str, Any] = {"max_new_tokens": 32, "do_sample": False}
    expected = plain(model, PROMPT, **options)
    mtp = fitted_mtp(model, expected)
    monkeypatch.setattr(MtpModel, "from_pretrained", lambda *args, **kwargs: mtp)
    forwards = []
    handle = model.register_forward_hook(lambda *_: forwards.append(1))
    theirs = plain(model, PROMPT, use_mtp=True, **options)
    handle.remove()
    assert torch.equal(theirs, expected)
    shape = {"num_branches": 1, "draft_len": len(mtp.layers)}
    ours = model.generate(PROMPT, assistant_model=mtp, return_dict_in_generate=True, **options, **always(shape))
    assert torch.equal(ours.sequences, expected)
    assert len(forwards) < 24, "the layers were fitted, so that transformers' loop accepts"
    assert ours.spec_stats.num_forwards + 1 <= len(forwards)


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
            assistant_model=mtp,
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
    out = model.generate(PROMPT, assistant_model=mtp, **options, **always({"num_branches": 1, "draft_len": 3}))
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
    own = model.generate(PROMPT, **options, spec_observer=steps[0].append, **always(SHAPES["chain"]))
    given = mellum[0].generate(
        PROMPT, assistant_model=mellum[1], **options, spec_observer=steps[1].append, **always(SHAPES["chain"])
    )
    assert torch.equal(own.sequences, expected)
    assert torch.equal(given.sequences, expected)
    assert [step.tree.tokens for step in steps[0]] == [step.tree.tokens for step in steps[1]]
    head = hf_specdec.AutoDraftHead.from_pretrained(tmp_path, target=model)
    for method in ("mtp", "auto"):
        assert torch.equal(model.generate(PROMPT, **options, spec_method=method, assistant_model=head)[0], expected)
    copied = copy.deepcopy(model)
    assert torch.equal(copied.generate(PROMPT, **options, spec_method="mtp").sequences, expected)


def test_auto_takes_the_layers_as_one_more_source(mellum: tuple[Any, MtpModel]) -> None:
    model, _ = mellum
    expected = plain(model, PROMPT, max_new_tokens=24, do_sample=False)
    mtp = fitted_mtp(model, expected)
    sources: set[str] = set()
    ours = model.generate(
        PROMPT,
        max_new_tokens=24,
        do_sample=False,
        assistant_model=mtp,
        spec_method="auto",
        spec_config={"num_nodes": 8, "pool": "request"},
        spec_observer=lambda step: sources.update(node.source for node in step.nodes),
    )
    assert torch.equal(ours, expected)
    assert "mtp" in sources


def test_generate_many_keeps_every_text(pair: tuple[Any, MtpModel]) -> None:
    model, mtp = pair
    prompts = [PROMPT[0, start : start + length] for start, length in ((0, 9), (3, 14), (8, 2), (1, 20), (5, 1))]
    options: dict[str, Any] = {"max_new_tokens": 8, "do_sample": False}
    expected = [plain(model, prompt[None], **options)[0, len(prompt) :].tolist() for prompt in prompts]
    found = hf_specdec.generate_many(
        model, prompts, max_batch_size=2, assistant_model=mtp, **options, **always(SHAPES["tree"])
    )
    ours = {result.index: result.token_ids for result in found}
    assert [ours[index] for index in range(len(prompts))] == expected


def test_a_model_without_mtp_layers_is_refused(model: Any, tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModelError, match=r"LlamaForCausalLM .*num_mtp_layers is 0"):
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
    other = copy.deepcopy(mtp)
    other.config.hidden_size = 64
    with pytest.raises(ConfigError, match=r"hidden_size 48, but is 'a head for 64'"):
        model.generate(PROMPT, max_new_tokens=4, spec_method="mtp", assistant_model=other)
    with pytest.raises(ConfigError, match=r'spec_method="mtp" for a head of this kind'):
        model.generate(PROMPT, max_new_tokens=4, spec_method="eagle3", assistant_model=mtp)
    with pytest.raises(ConfigError, match=r'spec_method="eagle3" for a head of this kind'):
        model.generate(PROMPT, max_new_tokens=4, spec_method="mtp", assistant_model=random_head(model))
    with pytest.raises(ConfigError, match="must be a draft head"):
        model.generate(PROMPT, max_new_tokens=4, spec_method="mtp", assistant_model=model)
