"""accelerate's maps: parts of a model on the CPU, on disk, or both, and the text is the text of plain `generate`."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch

import hf_specdec
from hf_specdec.compat.devices import load_factor
from hf_specdec.distributed.placement import is_placed, where_it_lies
from tests.helpers.support import MASK, PADDED, PROMPT, noisy_copy, plain, results_of

CPU = torch.device("cpu")
PARTS = ("model.embed_tokens", "model.layers.0", "model.layers.1", "model.layers.2", "model.norm", "model.rotary_emb")
MAPS: dict[str, Any] = {
    "auto": "auto",
    "cpu": {"": "cpu"},
    "disk": "disk",
    "embeddings on disk": dict.fromkeys(PARTS, "cpu") | {"model.embed_tokens": "disk", "lm_head": "cpu"},
    "head on disk": dict.fromkeys(PARTS, "cpu") | {"lm_head": "disk"},
    "every other layer on disk": dict.fromkeys(PARTS, "disk") | {"model.layers.1": "cpu", "lm_head": "cpu"},
}
METHODS: dict[str, dict[str, Any]] = {
    "plain": {"spec_method": "plain"},
    "auto": {"spec_method": "auto", "spec_config": {"num_nodes": 8, "pool": "request"}},
    "lookahead": {"spec_method": "lookahead", "spec_config": [4, 3, 5]},
    "draft_model": {"spec_method": "draft_model", "spec_config": {"confidence_threshold": 0.0, "num_branches": 2}},
    "assisted": {"spec_method": "prompt_lookup", "spec_config": {"engine": "assisted"}},
    "static": {"spec_method": "prompt_lookup", "cache_implementation": "static"},
    "decode": {"spec_method": "prompt_lookup", "custom_generate": hf_specdec.decode},
}


@pytest.fixture(scope="module")
def folder(zoo: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A target's checkpoint and its draft's."""
    folder = tmp_path_factory.mktemp("checkpoints")
    model = hf_specdec.disable(copy.deepcopy(zoo("llama")))
    model.save_pretrained(folder / "target")
    noisy_copy(model).save_pretrained(folder / "draft")
    return folder


@pytest.fixture(scope="module", params=MAPS)
def pair(request: pytest.FixtureRequest, folder: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Any]:
    """Target and draft, loaded with the same map."""
    load = hf_specdec.AutoModelForCausalLM.from_pretrained
    target, draft = (
        load(
            folder / name,
            device_map=MAPS[request.param],
            offload_folder=str(tmp_path_factory.mktemp("offload")),
        )
        for name in ("target", "draft")
    )
    return target, draft


@pytest.fixture
def methods(pair: tuple[Any, Any]) -> dict[str, dict[str, Any]]:
    """The methods' arguments, with the draft that lies where the target lies."""
    return {
        name: how | ({"assistant_model": pair[1]} if name == "draft_model" else {}) for name, how in METHODS.items()
    }


def test_drafts_are_longer_where_weights_are_brought_in_for_each_forward(folder: Path, tmp_path: Path) -> None:
    """A token more in such a forward, and a forward of a draft in memory, cost little next to it."""
    load, outputs, factors = hf_specdec.AutoModelForCausalLM.from_pretrained, [], []
    draft = load(folder / "draft")
    half = dict.fromkeys(PARTS, "cpu") | {"model.layers.1": "disk", "model.layers.2": "disk", "lm_head": "cpu"}
    for number, device_map in enumerate(({"": "cpu"}, half, {"": "disk"})):
        target = load(folder / "target", device_map=device_map, offload_folder=str(tmp_path / str(number)))
        factors.append(load_factor(target))
        how = {"spec_method": "draft_model", "assistant_model": draft, "return_dict_in_generate": True}
        outputs.append(target.generate(PROMPT, max_new_tokens=24, **how))
    assert 1.0 == factors[0] < factors[1] < factors[2]
    in_memory, _, on_disk = [item.spec_stats.num_draft_tokens / item.spec_stats.num_drafts for item in outputs]
    assert in_memory < on_disk
    assert outputs[0].sequences.equal(outputs[2].sequences)


@pytest.mark.at_most(1)
@pytest.mark.parametrize("method", METHODS)
def test_a_text_is_plain_s(pair: tuple[Any, Any], methods: Any, method: str, model: Any) -> None:
    """Greedy and, where the seed counts, sampled."""
    for do_sample in (False, True) if method != "assisted" else (False,):
        settings = {"max_new_tokens": 16, "do_sample": do_sample}
        torch.manual_seed(3)
        expected = plain(model, PROMPT, **settings)
        torch.manual_seed(3)
        assert pair[0].generate(PROMPT, **settings, **methods[method]).tolist() == expected.tolist()


@pytest.mark.at_most(1)
@pytest.mark.parametrize("method", sorted(set(METHODS) - {"assisted"}))
def test_a_batch_is_plain_s(pair: tuple[Any, Any], methods: Any, method: str, model: Any) -> None:
    settings = {"max_new_tokens": 16, "do_sample": False, "attention_mask": MASK}
    ours = pair[0].generate(PADDED, **settings, **methods[method])
    assert ours.tolist() == plain(model, PADDED, **settings).tolist()


@pytest.mark.parametrize("method", ["lookahead", "draft_model"])
def test_many_prompts_are_plain_s(pair: tuple[Any, Any], methods: Any, method: str, model: Any) -> None:
    prompts = [PROMPT[0, start : start + 12 + start].tolist() for start in range(5)]
    options = {"max_batch_size": 2, "max_new_tokens": 10, "do_sample": False}
    for result in results_of(pair[0], prompts, **options, **methods[method]):
        ids = torch.tensor([prompts[result.index]])
        expected = plain(model, ids, max_new_tokens=10, do_sample=False)
        assert result.token_ids == expected[0, ids.shape[1] :].tolist()


def test_a_device_list_names_where_the_model_computes(pair: tuple[Any, Any], model: Any) -> None:
    """Weights on disk are computed with on the CPU: that is where the model is."""
    assert is_placed(pair[0], [CPU])
    settings = {"max_new_tokens": 6, "do_sample": False}
    ours = pair[0].generate(PROMPT, **settings, prompt_lookup_config=[4, 2, ["cpu"]])
    assert torch.equal(ours, plain(model, PROMPT, **settings))


def test_a_memory_limit_sends_layers_to_disk(tmp_path: Path) -> None:
    """The embedded target, large enough for accelerate to split it; the draft stays whole."""
    load = hf_specdec.AutoModelForCausalLM.from_pretrained
    path = hf_specdec.embedded.path("target")
    limits = {"device_map": "auto", "max_memory": {"cpu": 12_000_000}, "offload_folder": str(tmp_path)}
    target = load(path, precision="fp32", **limits)
    draft = load(hf_specdec.embedded.path("draft"), precision="fp32")
    assert where_it_lies(target) == ["cpu", "disk"]
    settings = {"max_new_tokens": 16, "do_sample": False}
    expected = plain(load(path, precision="fp32"), PROMPT, **settings)
    for how in ({"spec_method": "prompt_lookup"}, {"spec_method": "draft_model", "assistant_model": draft}):
        assert torch.equal(target.generate(PROMPT, **settings, **how), expected)
