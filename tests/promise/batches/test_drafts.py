"""Draft models of every make in batches: the text is the target's, whatever drafts for it and however it is wrapped."""

import copy
from collections.abc import Callable
from typing import Any

import accelerate
import pytest
import torch

import hf_specdec
from tests.helpers.support import IDS, MASK, METHODS, PADDED, assert_same_batch, noisy_copy, plain
from tests.helpers.zoo import FAMILIES, build

OPTIONS: dict[str, Any] = {"max_new_tokens": 14, "do_sample": False, "attention_mask": MASK}


@pytest.fixture(scope="module")
def pair() -> tuple[Any, Any]:
    model = hf_specdec.enable(build(FAMILIES["llama"]))
    return model, noisy_copy(model)


@pytest.fixture(scope="module")
def ends(pair: tuple[Any, Any]) -> list[int]:
    """Tokens that end the first two rows early."""
    free = plain(pair[0], PADDED, **OPTIONS)
    return [int(free[0, 33]), int(free[1, 38])]


def dispatched(model: Any) -> Any:
    return accelerate.dispatch_model(model, device_map={"": "cpu"}, main_device="cpu", force_hooks=True)


def with_lora(model: Any) -> Any:
    peft = pytest.importorskip("peft")

    return peft.get_peft_model(model, peft.LoraConfig(target_modules=["q_proj"], init_lora_weights=False))


DRAFTS: dict[str, Callable[[Any, Any], Any]] = {
    "the target itself": lambda model, draft: model,
    "bf16": lambda model, draft: copy.deepcopy(draft).to(torch.bfloat16),
    "enabled": lambda model, draft: hf_specdec.enable(copy.deepcopy(draft)),
    "lora": lambda model, draft: with_lora(copy.deepcopy(draft)),
    "compiled": lambda model, draft: torch.compile(copy.deepcopy(draft), backend="eager"),
    "dispatched": lambda model, draft: dispatched(copy.deepcopy(draft)),
}


@pytest.mark.at_most(2)
@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")  # peft's
@pytest.mark.parametrize("kind", DRAFTS)
def test_any_draft_serves_a_batch(pair: tuple[Any, Any], ends: list[int], kind: str) -> None:
    model = pair[0]
    draft = DRAFTS[kind](*pair)
    for config in ({}, {"num_branches": 3, "max_nodes": 9}):
        method = METHODS["draft_model"] | {"spec_config": {"confidence_threshold": 0.0, **config}}
        assert_same_batch(model, method | {"assistant_model": draft}, PADDED, eos_token_id=ends, **OPTIONS)


def test_rejection_sampling_of_a_batch_follows_the_seed(pair: tuple[Any, Any]) -> None:
    """Row by row: a row's text does not depend on its neighbours either."""
    model, draft = pair
    options = {**OPTIONS, "do_sample": True, "spec_method": "draft_model", "spec_config": {"use_logits": True}}
    texts = []
    for _ in range(2):
        torch.manual_seed(3)
        texts.append(model.generate(PADDED, assistant_model=draft, **options).tolist())
    assert texts[0] == texts[1]
    wanted = {"do_sample": True, "max_new_tokens": 8, "seed": 4, "assistant_model": draft}
    wanted |= {name: options[name] for name in ("spec_method", "spec_config")}
    jobs = []
    for size in (1, 3):
        results = hf_specdec.generate_many(model, IDS, max_batch_size=size, **wanted)
        jobs.append({result.index: result.token_ids for result in results})
    assert jobs[0] == jobs[1]


@pytest.mark.parametrize("family", ["llama", "gemma3", "lfm2"])
def test_embeddings_of_several_rows(zoo: Callable[[str], Any], family: str) -> None:
    model = zoo(family)
    embeddings = model.get_input_embeddings()(PADDED)
    free = plain(model, inputs_embeds=embeddings, **OPTIONS)
    options = OPTIONS | {"inputs_embeds": embeddings, "eos_token_id": [int(free[0, 4]), int(free[1, 7])]}
    expected = plain(model, **options).tolist()
    assert model.generate(spec_method="prompt_lookup", **options).tolist() == expected
