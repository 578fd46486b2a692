"""Device lists: what they name is there or is an error, and models lie where they say."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from accelerate import cpu_offload

import hf_specdec
from hf_specdec.distributed import placement
from hf_specdec.distributed.placement import (
    available_devices,
    is_placed,
    move,
    move_pair,
    place,
    read_devices,
    with_checked_map,
)
from hf_specdec.errors import ConfigError
from tests.helpers.support import PROMPT, noisy_copy, plain

CPU = torch.device("cpu")
TWO_GPUS = [CPU, torch.device("cuda:0"), torch.device("cuda:1")]


@pytest.fixture
def two_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine that says it has two GPUs of a gibibyte each."""
    monkeypatch.setattr(placement, "available_devices", lambda: TWO_GPUS)
    monkeypatch.setattr(placement, "_free_bytes", lambda device: 2**30)
    monkeypatch.setattr(torch.accelerator, "current_device_index", lambda: 0)


@pytest.fixture
def fresh(model: Any) -> Any:
    """An enabled model of the test's own."""
    return hf_specdec.enable(copy.deepcopy(hf_specdec.disable(model)))


@pytest.mark.parametrize("devices", [[99], ["cuda:99"], ["cpu", 99], ["meta"], ["cpu:7"]])
def test_a_device_that_is_not_there_is_an_error_that_lists_what_there_is(devices: list[int | str]) -> None:
    assert read_devices(["cpu"]) == read_devices(["cpu", "cpu:0"]) == available_devices()[:1] == [CPU]
    with pytest.raises(ConfigError) as caught:
        read_devices(devices, "target_model_device_list")
    assert caught.value.field == "target_model_device_list"
    assert caught.value.value == devices
    assert str([str(device) for device in available_devices()])[1:-1].replace("'", "") in str(caught.value)


PATH = hf_specdec.embedded.path("target")
LOADERS: dict[str, tuple[str, Callable[[Any], Any]]] = {
    "model": ("device_map", lambda device: hf_specdec.AutoModelForCausalLM.from_pretrained(PATH, device_map=device)),
    "parts": (
        "device_map",
        lambda device: hf_specdec.AutoModelForCausalLM.from_pretrained(PATH, device_map={"": "cpu", "model": device}),
    ),
    "head": ("device", lambda device: hf_specdec.AutoDraftHead.from_pretrained(PATH, device=device)),
}


@pytest.mark.parametrize("loader", LOADERS)
@pytest.mark.parametrize("device", ["cuda:99", 99, torch.device("cuda", 99), torch.device("cpu", 7)], ids=str)
def test_nothing_is_loaded_to_a_device_that_is_not_there(loader: str, device: Any) -> None:
    field, load = LOADERS[loader]
    with pytest.raises(
        ConfigError, match=f"`{field}` must be a device that is here \\(cpu.* Name one of them"
    ) as caught:
        load(device)
    assert caught.value.value == device


def test_strategies_and_places_without_a_device_are_no_devices(two_gpus: None) -> None:
    for device_map in ("auto", "sequential", "disk", "meta", None, {"a": "disk", "b": 1}, "cuda", 0):
        with_checked_map({"device_map": device_map})


def test_numbers_and_names_of_gpus_mean_the_same(two_gpus: None) -> None:
    assert place([1]) == ({"": "cuda:1"}, None)
    assert place([0, 1]) == ("auto", {0: 2**30, 1: 2**30})
    assert read_devices([1]) == read_devices(["cuda:1"]) == [TWO_GPUS[2]]
    assert read_devices(["cuda", 1, 0]) == TWO_GPUS[1:]
    with pytest.raises(ConfigError, match=r"here \(cpu, cuda:0, cuda:1\)"):
        read_devices([2])
    with pytest.raises(ConfigError, match="must name GPUs only"):
        read_devices(["cpu", 1])
    for name in ("gpu0", "cuda:x"):
        with pytest.raises(ConfigError, match="must name devices that torch knows"):
            read_devices([name])


def test_models_are_moved_to_their_devices_unless_they_are_there(
    fresh: Any, two_gpus: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    draft, moved = noisy_copy(fresh), list[Any]()
    monkeypatch.setattr(fresh.__class__, "to", lambda self, device: moved.append((self, device)))
    move(fresh, ["cpu"])
    assert is_placed(fresh, [CPU])
    assert moved == []
    move_pair(fresh, draft, target_devices=[0], draft_devices=[1])
    assert moved == [(fresh, TWO_GPUS[1]), (draft, TWO_GPUS[2])]


def test_several_devices_share_the_model(fresh: Any, two_gpus: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """accelerate splits it, by the room that there is, and without tearing a layer apart."""
    device_map, seen = {"model": 0, "lm_head": 1}, []

    def infer(model: Any, max_memory: dict[int, int], no_split_module_classes: list[str]) -> dict[str, int]:
        assert set(max_memory) == {0, 1}
        assert no_split_module_classes == ["LlamaDecoderLayer"]
        return device_map

    monkeypatch.setattr(placement, "get_balanced_memory", lambda model, max_memory, no_split_module_classes: max_memory)
    monkeypatch.setattr(placement, "infer_auto_device_map", infer)
    monkeypatch.setattr(placement, "dispatch_model", lambda model, device_map: seen.append(device_map))
    move(fresh, [0, 1])
    assert seen == [device_map]


def test_too_little_room_is_an_error(fresh: Any, two_gpus: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(placement, "_free_bytes", lambda device: 2**10)
    with pytest.raises(ConfigError, match="must have room for LlamaForCausalLM"):
        move(fresh, [0, 1])


def test_a_model_with_accelerate_s_hooks_is_not_moved(fresh: Any, two_gpus: None) -> None:
    cpu_offload(fresh, execution_device=CPU)
    with pytest.raises(ConfigError, match="was dispatched to") as caught:
        move(fresh, [0])
    assert "device_map" in caught.value.remedy


def test_shared_weights_stay_together(fresh: Any, two_gpus: None) -> None:
    sharing = noisy_copy(fresh)
    sharing.set_input_embeddings(fresh.get_input_embeddings())
    for lists in ({"target_devices": [1], "draft_devices": [0]}, {"target_devices": None, "draft_devices": [0]}):
        with pytest.raises(ConfigError, match="whose weights it shares"):
            move_pair(fresh, sharing, **lists)
    move_pair(fresh, sharing, target_devices=["cpu"], draft_devices=["cpu"])


CALLS: dict[str, Callable[[Any], dict[str, Any]]] = {
    "prompt_lookup": lambda draft: {"spec_method": "prompt_lookup", "spec_config": [10, 2, ["cpu"]]},
    "draft_model": lambda draft: {
        "spec_method": "draft_model",
        "assistant_model": draft,
        "spec_config": [4, ["cpu"], ["cpu"], False],
    },
    "draft only": lambda draft: {"assistant_model": draft, "draft_target_model_config": [4, ["cpu"]]},
}


@pytest.mark.parametrize("how", CALLS.values(), ids=CALLS)
def test_generate_places_the_models_and_the_text_is_the_same(model: Any, how: Callable[[Any], dict[str, Any]]) -> None:
    expected = plain(model, PROMPT, max_new_tokens=12, do_sample=False)
    ours = model.generate(PROMPT, max_new_tokens=12, do_sample=False, **how(noisy_copy(model)))
    assert torch.equal(ours, expected)


@pytest.mark.parametrize(
    ("how", "field"),
    [
        ({"spec_config": [10, 2, [99]], "spec_method": "prompt_lookup"}, "device_list"),
        ({"draft_target_model_config": [4, [98], [99], False]}, "draft_model_device_list"),
        ({"draft_model_config": [4, ["cpu"], [99], False]}, "target_model_device_list"),
    ],
)
def test_generate_refuses_a_device_that_is_not_there(model: Any, how: dict[str, Any], field: str) -> None:
    drafts = {} if field == "device_list" else {"assistant_model": noisy_copy(model)}
    with pytest.raises(ConfigError, match=f"`{field}` must name devices that are here"):
        model.generate(PROMPT, max_new_tokens=4, **drafts, **how)


def test_custom_generate_cannot_move_the_target_any_more(model: Any, two_gpus: None) -> None:
    with pytest.raises(ConfigError, match="must name where the target is with custom_generate"):
        plain(
            model,
            PROMPT,
            max_new_tokens=4,
            custom_generate=hf_specdec.decode,
            spec_method="prompt_lookup",
            spec_config=[10, 2, [0]],
        )


def test_an_offloaded_draft_drafts(model: Any) -> None:
    """Its weights lie on no device between forwards; inputs go where it is executed."""
    draft = noisy_copy(model)
    cpu_offload(draft, execution_device=CPU)
    assert draft.device.type == "meta"
    expected = plain(model, PROMPT, max_new_tokens=12, do_sample=False)
    ours = model.generate(PROMPT, max_new_tokens=12, do_sample=False, spec_method="draft_model", assistant_model=draft)
    assert torch.equal(ours, expected)
