"""On a device that is not the CPU: the same tokens as plain `generate` there, and one read a step by the host.

The device is emulated: a tensor made in the wrong place is an error, as on a GPU. `tests/gpu` holds what needs one.
"""

import collections
import copy
import itertools
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

import hf_specdec
from hf_specdec import embedded
from hf_specdec.common.transfer import Sender
from tests.helpers.devices import DEVICE, SAMPLING, STATIC, TREES, DeviceBatch, DeviceTensor, EmulatedDevice, moved
from tests.helpers.heads import CASES, SHAPES, Zoo, always
from tests.helpers.support import PROMPT, noisy_copy, plain, results_of
from tests.matrix.test_batches import METHODS
from tests.matrix.test_many import PROMPTS, SEED

DRAFTING = [name for name in METHODS if name != "plain"]
READ_ONCE: dict[str, dict[str, Any]] = {
    "prompt_lookup": {"spec_method": "prompt_lookup"},
    "lookahead": {"spec_method": "lookahead", "spec_config": [4, 3, 5]},
    "auto": {"spec_method": "auto", "spec_config": {"num_nodes": 9, "pool": "request"}},
}
DRAFTS: dict[str, dict[str, Any]] = {
    "draft_model": always("draft_model", SHAPES["tree"]),
    "eagle3, reduced vocabulary": always("eagle3", SHAPES["tree"]),
    "mtp, glm4_moe, 3 layers": always("mtp", SHAPES["tree"]),
    "dflash, llama": always("dflash", SHAPES["tree"]),
}


@pytest.fixture
def device() -> Iterator[EmulatedDevice]:
    with EmulatedDevice() as entered:
        yield entered


@pytest.fixture
def place(device: EmulatedDevice) -> torch.device:
    """Where models are: `tests/gpu` runs the tests that have it on a GPU."""
    return DEVICE


@pytest.mark.at_most(1)
@pytest.mark.parametrize("method", DRAFTING)
@pytest.mark.parametrize("family", TREES)
def test_each_row_is_plain_generates(place: torch.device, zoo: Zoo, family: str, method: str) -> None:
    batch = DeviceBatch(zoo(family), place)
    assert batch.run(METHODS[method]).tolist() == batch.expected.sequences.tolist()


@pytest.mark.at_most(1)
@pytest.mark.parametrize("method", DRAFTING)
def test_a_sampled_row_is_its_prompt_alone(place: torch.device, zoo: Zoo, method: str) -> None:
    """Each row's generator is the device's."""
    batch = DeviceBatch(zoo("llama"), place)
    sampling = {"do_sample": True, "temperature": 0.8, "top_k": 20}
    output = batch.run(METHODS[method], return_dict_in_generate=True, **sampling)
    options = {**batch.options, **sampling, "attention_mask": batch.mask[:1]}
    torch.manual_seed(output.spec_stats.seeds[0])
    alone = plain(batch.model, batch.ids[:1], **options)[0]
    assert output.sequences[0, : len(alone)].tolist() == alone.tolist()


@pytest.mark.at_most(1)
@pytest.mark.parametrize("do_sample", [False, True])
@pytest.mark.parametrize("name", CASES)
def test_a_head_changes_nothing(place: torch.device, zoo: Zoo, name: str, do_sample: bool) -> None:
    target, prompt = CASES[name].target(zoo), PROMPT.to(place)
    head, target = copy.deepcopy(CASES[name].head(target)).to(place), moved(target, place)
    options: dict[str, Any] = {"max_new_tokens": 12, "do_sample": do_sample, "top_k": 30}
    torch.manual_seed(5)
    expected = plain(target, prompt, **options)
    torch.manual_seed(5)
    how = always(CASES[name].method, SHAPES["tree"])
    ours = target.generate(prompt, assistant_model=head, return_dict_in_generate=True, **options, **how)
    assert ours.sequences.tolist() == expected.tolist()
    assert ours.spec_stats.num_draft_tokens > 0


@pytest.mark.at_most(1)
@pytest.mark.parametrize("do_sample", [True, False])
@pytest.mark.parametrize("family", TREES)
def test_many_prompts_are_each_alone(place: torch.device, zoo: Zoo, family: str, do_sample: bool) -> None:
    model = moved(zoo(family), place)
    options: dict[str, Any] = {"max_new_tokens": 10, "do_sample": do_sample, "eos_token_id": [17, 33, 60]}
    for result in results_of(model, PROMPTS[:5], max_batch_size=2, seed=SEED, **options):
        torch.manual_seed(SEED + result.index)
        expected = plain(model, torch.tensor([result.prompt], device=place), **options)
        start = 1 if model.config.is_encoder_decoder else len(result.prompt)
        assert result.token_ids == expected[0, start:].tolist()


@pytest.mark.at_most(1)
@pytest.mark.parametrize("method", ["prompt_lookup", "lookahead", "auto"])
@pytest.mark.parametrize("family", STATIC)
def test_a_static_cache_gives_the_same_tokens(device: EmulatedDevice, zoo: Zoo, family: str, method: str) -> None:
    """As they are written: the emulated device compiles nothing."""
    model, options = moved(zoo(family), DEVICE), {"max_new_tokens": 16, "do_sample": False, "disable_compile": True}
    expected = plain(model, PROMPT.to(DEVICE), **options)
    output = model.generate(PROMPT.to(DEVICE), cache_implementation="static", spec_method=method, **options)
    assert output.tolist() == expected.tolist()


@pytest.mark.at_most(2)
@pytest.mark.parametrize("method", READ_ONCE)
def test_the_host_reads_once_a_step(device: EmulatedDevice, zoo: Zoo, method: str) -> None:
    """Whatever was accepted: two texts differ in their reads by the steps between them."""
    model, reads, steps = moved(zoo("llama"), DEVICE), [], []
    options: dict[str, Any] = {"do_sample": False, "return_dict_in_generate": True, **READ_ONCE[method]}
    model.generate(PROMPT.to(DEVICE), max_new_tokens=2, **options)  # what is tried out once
    for length in (4, 14):
        device.reads.clear()
        output = model.generate(PROMPT.to(DEVICE), max_new_tokens=length, **options)
        reads.append(collections.Counter(device.reads))
        steps.append(output.spec_stats.num_forwards)
    assert steps[1] > steps[0] + 1
    assert (reads[1] - reads[0]).total() == steps[1] - steps[0]


@pytest.mark.at_most(1)
@pytest.mark.parametrize("name", DRAFTS)
def test_a_draft_is_read_once_a_level_for_all_rows(device: EmulatedDevice, zoo: Zoo, name: str) -> None:
    """Three rows, up to four levels, and the target: five reads a step at most."""
    target = CASES[name].target(zoo) if name in CASES else zoo("llama")
    draft = CASES[name].head(target) if name in CASES else noisy_copy(target)
    options: dict[str, Any] = {"do_sample": False, "return_dict_in_generate": True, **DRAFTS[name]}
    options["assistant_model"] = copy.deepcopy(draft).to(DEVICE)
    model, seen = moved(target, DEVICE), list[int]()
    model.generate(PROMPT.to(DEVICE), max_new_tokens=2, **options)  # what is tried out once
    observe = {"spec_observer": lambda step: seen.append(len(device.reads))}
    output = model.generate(PROMPT.repeat(3, 1).to(DEVICE), max_new_tokens=24, **observe, **options)
    reads = [later - earlier for earlier, later in itertools.pairwise(sorted(set(seen)))]
    assert len(reads) == output.spec_stats.num_forwards - 1
    assert 1 < max(reads) <= 1 + SHAPES["tree"]["draft_len"]


@pytest.mark.at_most(1)
@pytest.mark.parametrize("shape", ["chain", "tree"])
def test_a_drawn_draft_is_read_once_a_level(device: EmulatedDevice, zoo: Zoo, shape: str) -> None:
    """And verified by one read a step, whatever is accepted."""
    model, draft, seen = moved(zoo("llama"), DEVICE), noisy_copy(zoo("llama")).to(DEVICE), []
    fields = {**SHAPES[shape], "use_logits": True}
    torch.manual_seed(1)
    output = model.generate(
        PROMPT.to(DEVICE),
        max_new_tokens=14,
        do_sample=True,
        temperature=0.2,
        assistant_model=draft,
        spec_observer=lambda step: seen.append(len(device.reads)),
        return_dict_in_generate=True,
        **always("draft_model", fields),
    )
    assert output.spec_stats.num_accepted_tokens > 0
    reads = [later - earlier for earlier, later in itertools.pairwise(seen)]
    assert max(reads) == 1 + fields["draft_len"]


@pytest.mark.at_most(1)
@pytest.mark.parametrize("sampling", SAMPLING)
@pytest.mark.parametrize("method", ["prompt_lookup", "auto"])
def test_choosing_reads_once_a_step_and_keeps_the_seed(
    device: EmulatedDevice, zoo: Zoo, method: str, sampling: str
) -> None:
    """What the nodes lead to comes with the read of the step; the generator ends where plain sampling leaves it."""
    model, seen = moved(zoo("llama"), DEVICE), []
    options: dict[str, Any] = {"max_new_tokens": 24, "do_sample": True, "top_k": 0, **SAMPLING[sampling]}
    torch.manual_seed(4)
    expected, after = plain(model, PROMPT.to(DEVICE), **options), torch.get_rng_state()
    model.generate(PROMPT.to(DEVICE), max_new_tokens=2, **READ_ONCE[method])  # what is tried out once
    torch.manual_seed(4)
    output = model.generate(
        PROMPT.to(DEVICE),
        **options,
        **READ_ONCE[method],
        spec_observer=lambda step: seen.append((len(step.accepted), len(device.reads))),
        return_dict_in_generate=True,
    )
    assert output.sequences.tolist() == expected.tolist()
    assert torch.equal(torch.get_rng_state(), after)
    assert output.spec_stats.num_accepted_tokens >= 3
    reads = [later - earlier for (_, earlier), (_, later) in itertools.pairwise(seen)]
    assert set(reads) == {1}


def test_the_emulated_device_refuses_what_a_gpu_refuses(device: EmulatedDevice) -> None:
    """Else no test above would see a tensor in the wrong place."""
    ours, other = torch.ones(3, device=DEVICE), torch.ones(3)
    assert isinstance(ours + 1, DeviceTensor)
    with pytest.raises(RuntimeError, match="same device"):
        ours + other
    with pytest.raises(RuntimeError, match="same device"):
        torch.cat([ours, other])
    with pytest.raises(RuntimeError, match="device for the generator"):
        torch.multinomial(ours, 1, generator=torch.Generator())
    with pytest.raises((TypeError, RuntimeError)):
        ours.numpy()
    assert not torch.accelerator.is_available(), "other tests see no device"


def test_the_emulated_device_lists_reads(device: EmulatedDevice) -> None:
    from hf_specdec.common.transfer import upload
    from hf_specdec.methods.common.node_logits import NodeLogits

    rows = upload(torch.eye(4), DEVICE)
    assert not device.reads
    assert [line.split(":")[0] for line in device.uploads] == ["common/transfer.py"]
    assert NodeLogits(rows).best() == [0, 1, 2, 3]
    assert [line.split(":")[0] for line in device.reads] == ["methods/common/node_logits.py"]


def test_an_embedded_head_reads_once_a_level(device: EmulatedDevice) -> None:
    """The states of accepted nodes, tokens, positions and masks take one upload a forward each.

    Where one token is left to be written nothing is drafted.
    """
    target = hf_specdec.AutoModelForCausalLM.from_pretrained(embedded.path("target"), dtype=torch.float32).to(DEVICE)
    head = hf_specdec.AutoDraftHead.from_pretrained(embedded.path("head")).to(DEVICE)
    seen: list[tuple[int, int, int]] = []
    forwards: list[Any] = []
    head.register_forward_hook(lambda *call: forwards.append(call))

    def observe(step: hf_specdec.SpecStep) -> None:
        seen.append((len(device.reads), len(device.uploads), len(forwards)))

    config = {"num_branches": 3, "draft_len": 3, "max_nodes": 8, "confidence_threshold": 0.0}
    output = target.generate(
        PROMPT.to(DEVICE),
        max_new_tokens=16,
        do_sample=False,
        assistant_model=head,
        spec_method="eagle3",
        spec_config=config,
        spec_observer=observe,
        return_dict_in_generate=True,
    )
    assert output.spec_stats.num_accepted_tokens > 0
    reads, uploads, levels = (
        [later - earlier for earlier, later in itertools.pairwise(counted)] for counted in zip(*seen, strict=True)
    )
    assert reads == [1 + number for number in levels], "the verification, and each level"
    assert max(levels) == config["draft_len"]
    assert max(uploads) <= 2 + 2 * config["draft_len"]


def test_arrays_of_the_same_shapes_are_sent_into_the_same_tensors(device: EmulatedDevice) -> None:
    """By one upload each time, apart from arrays of other shapes; a bfloat16's bits are sent as an integer's."""
    send = Sender(DEVICE)
    first = send([np.arange(3), np.full((2, 2), 0x3F80, np.int16)], [None, torch.bfloat16])
    again = send([np.arange(3) + 1, np.zeros((2, 2), np.int16)], [None, torch.bfloat16])
    other = send([np.arange(4)])
    assert len(device.uploads) == 3
    assert all(item is two for item, two in zip(first, again, strict=True))
    assert [tensor.tolist() for tensor in (*again, *other)] == [[1, 2, 3], [[0.0, 0.0]] * 2, [0, 1, 2, 3]]
