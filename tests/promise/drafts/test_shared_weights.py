"""A head whose file repeats the target's embeddings or output head: loaded for its target, it reads the target's."""

import copy
import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch

import hf_specdec
from hf_specdec.methods.common.draft_head import DraftHead
from hf_specdec.methods.dflash.network import DFlashHead
from hf_specdec.methods.eagle3.network import Eagle3Head
from hf_specdec.methods.eagle3.network import save_head as save_eagle3
from tests.helpers.head_models import random_dflash_head, save_dflash
from tests.helpers.heads import random_head
from tests.helpers.support import PROMPT, plain
from tests.helpers.zoo import FAMILIES, build

HOW: dict[str, Any] = {"max_new_tokens": 10, "do_sample": False}


@pytest.fixture
def target() -> Any:
    return hf_specdec.enable(build(FAMILIES["llama"]))


def with_weights_of(target: Any) -> DFlashHead:
    """A head that has the target's embeddings and output head."""
    result = random_dflash_head(target, kind="dflash")
    layer = copy.deepcopy(result.config.layer)
    layer.layer_types = ["full_attention"] * layer.num_hidden_layers
    config = dataclasses.replace(result.config, layer=layer, sliding_span=None)
    head = DFlashHead(config, has_embedding=True, has_output_head=True).eval().requires_grad_(False)
    head.load_state_dict(result.state_dict(), strict=False)
    assert head.embed_tokens is not None
    assert head.lm_head is not None
    head.embed_tokens.weight.copy_(target.get_input_embeddings().weight.detach())
    head.lm_head.weight.copy_(target.get_output_embeddings().weight.detach())
    return head


def load(head: DFlashHead, folder: Path, target: Any, **kwargs: Any) -> Any:
    save_dflash(head, folder)
    return hf_specdec.AutoDraftHead.from_pretrained(folder, target=target, **kwargs)


def own_modules(head: DraftHead) -> set[str]:
    return {name for name in ("embed_tokens", "lm_head") if getattr(head, name) is not None}


def drafted(target: Any, head: DraftHead) -> Any:
    kwargs = {"spec_method": head.methods[0], "assistant_model": head, "spec_config": {"confidence_threshold": 0.0}}
    return target.generate(PROMPT, **HOW, **kwargs, return_dict_in_generate=True)


def test_equal_weights_are_read_of_the_target(target: Any, tmp_path: Path) -> None:
    """The same text, by the same drafts, from a smaller head; what is done to the head leaves the target alone."""
    head = with_weights_of(target)
    loaded = load(head, tmp_path, target)
    assert own_modules(load(head, tmp_path, None)) == {"embed_tokens", "lm_head"}
    assert own_modules(loaded) == set()
    ours, whole = drafted(target, loaded), drafted(target, head)
    assert torch.equal(ours.sequences, plain(target, PROMPT, **HOW))
    assert ours.spec_stats.num_accepted_tokens == whole.spec_stats.num_accepted_tokens
    assert ours.spec_stats.num_draft_tokens == whole.spec_stats.num_draft_tokens
    kept = {name: weight.clone() for name, weight in target.state_dict().items()}
    for weight in loaded.parameters():
        weight.add_(1.0)
    assert all(torch.equal(weight, kept[name]) for name, weight in target.state_dict().items())


@pytest.mark.parametrize("name", ["embed_tokens", "lm_head"])
def test_other_weights_stay(target: Any, tmp_path: Path, name: str) -> None:
    head = with_weights_of(target)
    getattr(head, name).weight[3, 4] += 0.5
    loaded = load(head, tmp_path, target)
    assert own_modules(loaded) == {name}
    assert torch.equal(getattr(loaded, name).weight, getattr(head, name).weight)
    assert torch.equal(drafted(target, loaded).sequences, plain(target, PROMPT, **HOW))


@pytest.mark.parametrize(("cap", "ours"), [(None, {"embed_tokens"}), (3.0, {"embed_tokens", "lm_head"})])
def test_modules_that_compute_something_else_stay(tmp_path: Path, cap: float | None, ours: set[str]) -> None:
    """Gemma's embeddings are scaled as they are read, and its logits may be capped."""
    family = FAMILIES["gemma3"]
    options = {**family.options, "final_logit_softcapping": cap}
    target = hf_specdec.enable(build(dataclasses.replace(family, options=options)))
    loaded = load(with_weights_of(target), tmp_path, target)
    assert own_modules(loaded) == ours
    assert torch.equal(drafted(target, loaded).sequences, plain(target, PROMPT, **HOW))


def test_eagle3_heads_read_the_targets_embeddings(target: Any, tmp_path: Path) -> None:
    result = random_head(target)
    head = Eagle3Head(result.config, has_embedding=True).eval().requires_grad_(False)
    head.load_state_dict(result.state_dict(), strict=False)
    assert head.embed_tokens is not None
    head.embed_tokens.weight.copy_(target.get_input_embeddings().weight.detach())
    save_eagle3(head, tmp_path)
    loaded = hf_specdec.AutoDraftHead.from_pretrained(tmp_path, target=target)
    assert loaded.embed_tokens is None
    ours, whole = drafted(target, loaded), drafted(target, head)
    assert torch.equal(ours.sequences, whole.sequences)
    assert ours.spec_stats.num_accepted_tokens == whole.spec_stats.num_accepted_tokens
    other = hf_specdec.enable(build(dataclasses.replace(FAMILIES["llama"], seed=9)))
    assert hf_specdec.AutoDraftHead.from_pretrained(tmp_path, target=other).embed_tokens is not None
