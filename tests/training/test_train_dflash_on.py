"""Training a given DFlash head on: of every kind that is read from files, in its own form, for its own target."""

import copy
import functools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from transformers import LlamaForCausalLM, MuseGlimmerAssistantModel

import hf_specdec
from hf_specdec.errors import ConfigError
from hf_specdec.methods.dflash.checkpoint import load_head, save_head
from hf_specdec.methods.dflash.head_config import DFlashHeadConfig
from hf_specdec.methods.dflash.network import DFlashHead
from hf_specdec.methods.dflash.transformers_model import DFlashModelHead
from hf_specdec.tools.train import DFlashTraining, HeadReport, train_draft
from tests.helpers.head_models import random_dflash
from tests.training.conftest import PROMPTS, SETTINGS, WordNumbers

OWN: dict[str, dict[str, Any]] = {
    "dflash": {"speculators_model_type": "dflash", "draft_vocab_size": 40},
    "dflash, reduced": {"speculators_model_type": "dflash", "draft_vocab_size": 30},
    "dflash2": {"speculators_model_type": "dflash2", "selector_rank": 8, "selector_top_k": 6, "draft_vocab_size": 40},
    "dspark": {"speculators_model_type": "dspark", "markov_rank": 8, "draft_vocab_size": 40},
    "dspark, gated": {
        "speculators_model_type": "dspark",
        "markov_rank": 8,
        "markov_head_type": "gated",
        "draft_vocab_size": 30,
        "enable_confidence_head": True,
    },
    "dspark, rnn": {"speculators_model_type": "dspark", "markov_head_type": "rnn", "draft_vocab_size": 40},
    "flat": {"architectures": ["DFlashDraftModel"], "target_layer_ids": [0, 2]},
}
LAYER = {
    "vocab_size": 40,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "sliding_window": 8,
    "layer_types": ["sliding_attention", "full_attention"],
}
LONG = DFlashTraining(**{**SETTINGS, "epochs": 8.0})
SHORT = DFlashTraining(**{**SETTINGS, "num_texts": 16, "new_tokens": 8, "epochs": 1.0})


def make_head(kind: str, folder: Path) -> DFlashHead:
    """A random head of this kind, read from files; it has embeddings and an output head of its own."""
    own = {"block_size": 5, "mask_token_id": 39, "conv_group_size": 8, "markov_rank": 8, **OWN[kind]}
    if kind == "flat":
        values = {**LAYER, **own}
    else:
        values = {**own, "aux_hidden_state_layer_ids": [1, 3], "transformer_layer_config": LAYER}
    torch.manual_seed(1)
    head = DFlashHead(DFlashHeadConfig.from_dict(values), has_embedding=True, has_output_head=True)
    head.requires_grad_(False)
    for name, weight in head.named_parameters():
        weight.normal_(mean=float("norm" in name), std=0.1)
    if head.d2t is not None:
        head.d2t.copy_(torch.full_like(head.d2t, 5))
    head.published = values
    save_head(head, folder, num_target_layers=4)
    return load_head(folder)


class Trained(NamedTuple):
    """A head that was trained on from `folder / "given"` to `folder / "out"`."""

    folder: Path
    head: DFlashHead
    before: dict[str, torch.Tensor]
    report: HeadReport


def train(target: Any, head: Any, out: Path, config: DFlashTraining) -> HeadReport:
    tokenizer: Any = WordNumbers()
    return train_draft(target, tokenizer, PROMPTS, out, config, head=head)


@pytest.fixture(scope="module")
def trained(target: LlamaForCausalLM, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Trained]:
    """A head of each kind, trained once: before and after, with the report."""

    @functools.cache
    def of(kind: str) -> Trained:
        folder = tmp_path_factory.mktemp("trained")
        head = make_head(kind, folder / "given")
        before = copy.deepcopy(head.state_dict())
        report = train(target, head, folder / "out", LONG)
        return Trained(folder, head, before, report)

    return of


@pytest.mark.parametrize("kind", OWN)
def test_a_head_of_any_kind_learns_and_stays_what_it_is(kind: str, trained: Callable[[str], Trained]) -> None:
    folder, head, before, report = trained(kind)
    out = folder / "out"
    assert report.best_step > 0
    assert report.measured[0].tokens_per_step > 1.4
    assert all(torch.equal(weight, before[name]) for name, weight in head.state_dict().items())
    given, made = (json.loads((folder / "config.json").read_text()) for folder in (folder / "given", out))
    assert {**made, "dtype": 0} == {**given, "dtype": 0}
    assert not made.get("enable_confidence_head")
    weights = load_file(out / "model.safetensors")
    assert weights.keys() == load_file(folder / "given" / "model.safetensors").keys()
    for name in ("embed_tokens.weight", "lm_head.weight"):
        assert torch.equal(weights[name], before[name])
    assert not torch.equal(weights["fc.weight"], before["fc.weight"])
    card = (out / "README.md").read_text()
    assert "It began as given, and its files are in the same form." in card
    assert "it has embeddings and output head of its own, which were not trained" in card


@pytest.mark.parametrize("kind", ["dflash, reduced", "dflash2", "dspark, rnn"])
def test_what_was_measured_is_what_calls_accept(
    kind: str, target: LlamaForCausalLM, trained: Callable[[str], Trained]
) -> None:
    """On the held-out texts, greedily, block after block: chains of as many tokens."""
    folder, _, _, report = trained(kind)
    head, model = hf_specdec.AutoDraftHead.from_pretrained(folder / "out"), hf_specdec.enable(target)
    steps, tokens = 0, 0
    for prompt in PROMPTS[:12]:
        ids = torch.tensor([[int(word) for word in prompt.split()[:4]]])
        output = model.generate(
            ids,
            max_new_tokens=20,
            do_sample=False,
            spec_method="dflash",
            assistant_model=head,
            spec_config={"confidence_threshold": 0.0, "draft_len": 3},
            return_dict_in_generate=True,
        )
        steps, tokens = steps + output.spec_stats.num_drafts, tokens + output.spec_stats.num_accepted_tokens
    hf_specdec.disable(model)
    assert 1.0 + tokens / steps > 1.0 + 0.4 * (report.measured[0].tokens_per_step - 1.0)


@pytest.mark.parametrize("field", ["layer_ids", "draft_layers", "block_size", "markov_rank"])
def test_the_shape_of_a_head_that_is_trained_on_stays(field: str, target: LlamaForCausalLM, tmp_path: Path) -> None:
    config = DFlashTraining(**SETTINGS, **{field: (1, 2) if field == "layer_ids" else 4})
    with pytest.raises(ConfigError, match=f"`{field}` must be None where a head is trained on"):
        train(target, make_head("dflash", tmp_path / "given"), tmp_path / "out", config)


def test_what_cannot_be_trained_on_is_named(target: LlamaForCausalLM, tmp_path: Path) -> None:
    head = make_head("dflash", tmp_path / "given")
    with pytest.raises(ConfigError, match="`out` must not be the folder of a model that the training reads"):
        train(target, head, tmp_path / "given", SHORT)
    with pytest.raises(ConfigError, match="`rollout_steps` must be at most 4, what a block drafts"):
        train(target, head, tmp_path / "out", DFlashTraining(**{**SETTINGS, "rollout_steps": 5}))
    model = random_dflash(target)
    assert isinstance(model, MuseGlimmerAssistantModel)
    for other in (DFlashModelHead(model), nn.Linear(1, 1)):
        with pytest.raises(ConfigError, match="`head` must be a DFlash head that is not transformers' own"):
            train(target, other, tmp_path / "out", SHORT)
    small = LlamaForCausalLM(type(target.config)(**{**target.config.to_dict(), "hidden_size": 16}))
    with pytest.raises(ConfigError, match="`assistant_model` must read hidden states of the target's hidden_size 16"):
        train(small, head, tmp_path / "out", SHORT)
    assert not list((tmp_path / "out").glob("work/shard-*"))


def test_work_on_another_head_is_not_gone_on_with(target: LlamaForCausalLM, tmp_path: Path) -> None:
    head = make_head("dflash", tmp_path / "given")
    train(target, head, tmp_path / "out", SHORT)
    other = copy.deepcopy(head)
    other.fc.weight += 1.0
    with pytest.raises(ConfigError, match="`head` must be"):
        train(target, other, tmp_path / "out", SHORT)
    with pytest.raises(ConfigError, match="`layer_ids` must be|`head` must be"):
        train(target, None, tmp_path / "out", SHORT)
