"""Device lists on CUDA devices: models go where the lists say, and the text stays the same. Run with -m gpu."""

import copy
from typing import Any

import pytest
import torch

import hf_specdec
from hf_specdec.distributed.placement import available_devices, is_placed, place
from hf_specdec.errors import ConfigError
from tests.helpers.support import PROMPT, noisy_copy, plain

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
two_gpus = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
SETTINGS = {"max_new_tokens": 24, "do_sample": False}
WHERE = [(["cpu"], [0]), ([0], ["cpu"]), ([0], [0]), ([0], None), (None, [0])]


@pytest.fixture
def pair(zoo: Any) -> tuple[Any, Any]:
    """An enabled target and its draft, on the CPU."""
    model = hf_specdec.enable(copy.deepcopy(hf_specdec.disable(zoo("llama"))))
    return model, noisy_copy(model)


def devices(*models: Any) -> list[str]:
    return [next(model.parameters()).device.type for model in models]


def check(model: Any, draft: Any, lists: tuple[Any, Any], prompt: torch.Tensor = PROMPT) -> None:
    """A call with these device lists, draft's first, gives plain `generate`'s text, greedy and sampled."""
    for settings in (SETTINGS, SETTINGS | {"do_sample": True}):
        how = {"spec_method": "draft_model", "assistant_model": draft, "draft_model_config": [4, *lists, False]}
        torch.manual_seed(3)
        ours = model.generate(prompt, **settings, **how)
        torch.manual_seed(3)
        expected = plain(model, prompt.to(ours.device), **settings)
        assert torch.equal(ours, expected)


@pytest.mark.parametrize("lists", WHERE, ids=str)
def test_target_and_draft_go_where_their_lists_say(pair: tuple[Any, Any], lists: tuple[Any, Any]) -> None:
    check(*pair, lists)
    names = {None: "cpu", 0: "cuda", "cpu": "cpu"}
    draft, target = (names[None if wanted is None else wanted[0]] for wanted in lists)
    assert devices(*pair) == [target, draft]


def test_a_model_comes_back(pair: tuple[Any, Any]) -> None:
    for lists in (([0], [0]), (["cpu"], ["cpu"]), (["cpu"], [0])):
        check(*pair, lists)


def test_prompt_lookup_s_list_moves_the_model(pair: tuple[Any, Any]) -> None:
    model, _ = pair
    ours = model.generate(PROMPT, **SETTINGS, prompt_lookup_config=[10, 2, [0]])
    assert devices(model) == ["cuda"] and ours.device.type == "cuda"
    assert torch.equal(ours, plain(model, PROMPT.to("cuda"), **SETTINGS))


def test_a_gpu_too_many_is_an_error(pair: tuple[Any, Any]) -> None:
    model, draft = pair
    missing = torch.cuda.device_count()
    with pytest.raises(ConfigError, match="must name devices that are here") as caught:
        model.generate(PROMPT, assistant_model=draft, draft_model_config=[4, [0], [missing], False])
    assert all(str(device) in str(caught.value) for device in available_devices())
    assert devices(model, draft) == ["cpu", "cpu"], "nothing was moved"


def test_loading_puts_it_there() -> None:
    device_map, max_memory = place([0])
    model = hf_specdec.AutoModelForCausalLM.from_pretrained(
        hf_specdec.embedded.path("target"), precision="fp32", device_map=device_map, max_memory=max_memory
    )
    assert is_placed(model, [torch.device("cuda:0")])
    model.generate(PROMPT.to("cuda"), **SETTINGS, prompt_lookup_config=[10, 2, [0]])


@two_gpus
@pytest.mark.parametrize("lists", [([0], [1]), ([1], [0])], ids=str)
def test_target_and_draft_on_two_gpus(pair: tuple[Any, Any], lists: tuple[Any, Any]) -> None:
    check(*pair, lists)
    assert [next(model.parameters()).device.index for model in pair] == [lists[1][0], lists[0][0]]


@two_gpus
def test_a_model_is_spread_over_two_gpus() -> None:
    """The embedded target, large enough for accelerate to split it between layers."""
    load = hf_specdec.AutoModelForCausalLM.from_pretrained
    model, draft = (load(hf_specdec.embedded.path(name), precision="fp32") for name in ("target", "draft"))
    how = {"assistant_model": draft, "draft_target_model_config": [4, [1], [0, 1], False]}
    ours = model.generate(PROMPT, **SETTINGS, **how)
    assert is_placed(model, [torch.device("cuda:0"), torch.device("cuda:1")])
    assert torch.equal(ours, plain(model, PROMPT.to(ours.device), **SETTINGS))
    with pytest.raises(ConfigError, match="was dispatched to"):
        model.generate(PROMPT, **SETTINGS, prompt_lookup_config=[10, 2, [0]])


@pytest.mark.parametrize("places", [{0: "12MB", "cpu": "1GB"}, {"cpu": "12MB"}], ids=str)
def test_weights_offloaded_from_the_gpu(places: dict[Any, str], tmp_path: Any) -> None:
    """Parts in the CPU's memory, or on disk: computed where accelerate says, prompts and all."""
    load = hf_specdec.AutoModelForCausalLM.from_pretrained
    path = hf_specdec.embedded.path("target")
    limits = {"device_map": "auto", "max_memory": places, "offload_folder": str(tmp_path)}
    model = load(path, precision="fp32", **limits)
    draft = load(hf_specdec.embedded.path("draft"), precision="fp32", device_map={"": 0})
    expected = plain(model, PROMPT, **SETTINGS).cpu()
    for how in ({"spec_method": "prompt_lookup"}, {"spec_method": "draft_model", "assistant_model": draft}):
        assert torch.equal(model.generate(PROMPT, **SETTINGS, **how).cpu(), expected)
    many = hf_specdec.generate_many(model, [PROMPT[0].tolist()] * 2, **SETTINGS, spec_method="prompt_lookup")
    assert all(result.token_ids == expected[0, PROMPT.shape[1] :].tolist() for result in many)
