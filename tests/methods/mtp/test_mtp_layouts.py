"""MTP layers are read from checkpoints as each family publishes them, and compute what the family's formula says."""

import itertools
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import DynamicCache

import hf_specdec
from hf_specdec.errors import CheckpointError
from tests.helpers.heads import SHAPES, always
from tests.helpers.mtp_layouts import LAYOUTS, Layout, Saved, reference_logits
from tests.helpers.support import PROMPT, plain

Case = tuple[Layout, Saved, Any]


@pytest.fixture(scope="module", params=list(LAYOUTS))
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Case:
    layout, folder = LAYOUTS[request.param], tmp_path_factory.mktemp(request.param)
    saved = layout.save(folder)
    before = saved.target.config.to_dict()
    head = hf_specdec.AutoDraftHead.from_pretrained(str(folder), target=saved.target)
    assert saved.target.config.to_dict() == before
    return layout, saved, head


@pytest.mark.at_most(8)
def test_logits_are_those_of_the_familys_formula(case: Case) -> None:
    layout, saved, head = case
    text = torch.randint(3, 60, (1, 40), generator=torch.Generator().manual_seed(3))
    expected = reference_logits(layout, saved, text)
    assert head.num_stages == len(expected) == layout.num_layers
    with torch.no_grad():
        states = saved.target(text, output_hidden_states=True).hidden_states[-1]
        embedded = saved.target.get_input_embeddings()(text)
        for stage, logits in enumerate(expected):
            states, positions = states[:, :-1], torch.arange(stage + 1, text.shape[1])[None]
            mask = (positions[..., None] >= positions[:, None])[:, None]
            states = head(
                embedded[:, stage + 1 :], states, positions, mask, DynamicCache(), key_positions=positions, stage=stage
            )
            ours = head.logits(states[0])
            torch.testing.assert_close(ours, logits[0], rtol=1e-4, atol=1e-4)


@pytest.mark.at_most(4)
@pytest.mark.each_value
@pytest.mark.parametrize("shape", SHAPES)
def test_the_text_is_that_of_plain_generation(case: Case, shape: str) -> None:
    _, saved, head = case
    expected = plain(saved.target, PROMPT, max_new_tokens=10, do_sample=False)
    options: dict[str, Any] = {"max_new_tokens": 10, "do_sample": False, "return_dict_in_generate": True}
    ours = saved.target.generate(PROMPT, assistant_model=head, **options, **always("mtp", SHAPES[shape]))
    assert torch.equal(ours.sequences, expected)
    assert ours.spec_stats.num_draft_tokens > 0
    assert ours.spec_stats.plain_reason is None


@pytest.mark.parametrize("name", ["qwen3_5_moe", "qwen3_next"])
def test_hybrids_draft_for_batches_jobs_and_samples(name: str, tmp_path: Path) -> None:
    """Layers found by the model's own path, in shards; states of the model follow the accepted drafts."""
    target = LAYOUTS[name].save(tmp_path).target
    _cut_into_shards(tmp_path)
    target.config.name_or_path = str(tmp_path)
    ids, mask = PROMPT.repeat(2, 1), torch.ones(2, PROMPT.shape[1], dtype=torch.long)
    ids[1, :5], mask[1, :5] = 0, 0
    call: dict[str, Any] = {"max_new_tokens": 12, "return_dict_in_generate": True}
    for shape, sampled in itertools.product(SHAPES.values(), (False, True)):
        how = always("mtp", shape)
        for inputs in ({"inputs": PROMPT}, {"inputs": ids, "attention_mask": mask}):
            torch.manual_seed(3)
            ours = target.generate(**inputs, **call, do_sample=sampled, **how)
            torch.manual_seed(ours.spec_stats.seeds[-1] if sampled and len(ours.sequences) > 1 else 3)
            last = {name: item[-1:] for name, item in inputs.items()}  # a row of a batch follows a seed of its own
            expected = plain(target, **last, **call, do_sample=sampled).sequences
            assert torch.equal(ours.sequences[-1:], expected)
            assert ours.spec_stats.num_draft_tokens > 0
    prompts = [PROMPT[0, :length].tolist() for length in (9, 14, 20)]
    call = {"max_new_tokens": 12, "do_sample": False}
    results = sorted(
        hf_specdec.generate_many(target, prompts, **call, **how, max_batch_size=2),
        key=lambda item: item.index,
    )
    for prompt, result in zip(prompts, results, strict=True):
        assert result.token_ids == plain(target, torch.tensor([prompt]), **call)[0, len(prompt) :].tolist()
        assert result.stats.num_draft_tokens > 0


def _cut_into_shards(folder: Path) -> None:
    """Divide a checkpoint into the layers of the model and the MTP layers."""
    weights = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    shards = {name: f"model-0000{1 + name.startswith('mtp.')}-of-00002.safetensors" for name in weights}
    for shard in set(shards.values()):
        part = {name: weight for name, weight in weights.items() if shards[name] == shard}
        save_file(part, folder / shard, {"format": "pt"})
    index = {"metadata": {"total_size": 0}, "weight_map": shards}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def _quantise(folder: Path, suffix: str) -> dict[str, torch.Tensor]:
    """Put FP8 matrices of blocks of 8 with scales into a checkpoint; returns the weights that they stand for."""
    weights, plain_weights = load_file(folder / "model.safetensors"), {}
    for name, weight in list(weights.items()):
        if name.endswith("_proj.weight") and all(size % 8 == 0 for size in weight.shape) and "eh_proj" not in name:
            blocks = weight.reshape(weight.shape[0] // 8, 8, -1, 8)
            scales = blocks.abs().amax((1, 3)) / 448
            small = (blocks / scales[:, None, :, None]).to(torch.float8_e4m3fn)
            plain_weights[name] = (small.float() * scales[:, None, :, None]).view_as(weight)
            weights |= {name: small.view_as(weight), name + suffix: scales}
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    return load_file(folder / "model.safetensors") | plain_weights


@pytest.mark.parametrize("name", ["deepseek_v3", "qwen3_5_moe", "qwen3_next"])
def test_fp8_layers_are_widened_by_the_scales_of_their_blocks(name: str, tmp_path: Path) -> None:
    target = LAYOUTS[name].save(tmp_path).target
    weights = _quantise(tmp_path, "_scale_inv")
    ours = hf_specdec.AutoDraftHead.from_pretrained(str(tmp_path), target=target).state_dict()
    save_file(
        {key: weight.float() for key, weight in weights.items() if not key.endswith("_scale_inv")},
        tmp_path / "model.safetensors",
        {"format": "pt"},
    )
    expected = hf_specdec.AutoDraftHead.from_pretrained(str(tmp_path), target=target).state_dict()
    assert ours.keys() == expected.keys()
    for key, weight in ours.items():
        torch.testing.assert_close(weight, expected[key], rtol=1e-6, atol=0)


def test_layers_that_are_quantised_otherwise_are_refused(tmp_path: Path) -> None:
    target = LAYOUTS["qwen3_next"].save(tmp_path).target
    _quantise(tmp_path, "_scale")
    with pytest.raises(CheckpointError, match=r"quantised otherwise than to FP8.*weight_scale.*original checkpoint"):
        hf_specdec.AutoDraftHead.from_pretrained(str(tmp_path), target=target)
