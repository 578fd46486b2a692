"""Distilling a draft model: it learns what its target writes, goes on after a kill, and loads as `assistant_model`."""

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, LlamaForCausalLM

import hf_specdec
from hf_specdec.errors import ConfigError, UnsupportedModelError
from hf_specdec.tools.train import DraftTraining, HeadReport, loop, train_draft
from hf_specdec.tools.train.batch import Texts
from hf_specdec.tools.train.draft import DraftRollout
from hf_specdec.tools.train.texts import read_shard, shard_path
from tests.helpers.zoo import FAMILIES, build
from tests.training.conftest import PROMPTS, SETTINGS, WordNumbers

TINY = DraftTraining(**SETTINGS, draft_layers=1)


@pytest.fixture(scope="module")
def train(target: LlamaForCausalLM) -> Callable[..., Any]:
    tokenizer: Any = WordNumbers()
    return lambda out, config=TINY: train_draft(target, tokenizer, PROMPTS, out, config)


@pytest.fixture(scope="module")
def trained(train: Callable[..., Any], tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, HeadReport]:
    folder = tmp_path_factory.mktemp("trained")
    return folder, train(folder)


def batch_of(folder: Path, index: int) -> Texts:
    return read_shard(folder / "work", index)


def test_it_drafts_better_than_the_layers_it_began_as(
    trained: tuple[Path, HeadReport],
    target: LlamaForCausalLM,
) -> None:
    """On the held-out greedy texts, which it has not learned from."""
    folder, report = trained
    batch = batch_of(folder, 0)
    with torch.no_grad():
        before = DraftRollout(hf_specdec.self_draft(target, layers=1), steps=3)(batch)
    greedy = report.measured[0]
    assert greedy.temperature == 0.0
    assert greedy.tokens_per_step > 1.2 + float(before.accepted.sum() / before.num_positions)
    assert report.best_step > 0


def test_it_loads_as_assistant_model_and_comes_with_a_card(
    trained: tuple[Path, HeadReport],
    target: LlamaForCausalLM,
) -> None:
    folder, report = trained
    draft = AutoModelForCausalLM.from_pretrained(folder)
    assert type(draft) is LlamaForCausalLM
    assert (draft.config.num_hidden_layers, draft.dtype) == (1, target.dtype)
    ids = read_shard(folder / "work", 0).ids[:1, :6]
    options = {"max_new_tokens": 16, "do_sample": False}
    expected = target.generate(ids, **options)
    model = hf_specdec.enable(target)
    output = model.generate(
        ids,
        spec_method="draft_model",
        spec_config={"confidence_threshold": 0.0},
        assistant_model=draft,
        return_dict_in_generate=True,
        **options,
    )
    hf_specdec.disable(target)
    assert output.sequences.tolist() == expected.tolist()
    assert output.spec_stats.num_accepted_tokens > 0
    card = (folder / "README.md").read_text()
    assert "A LlamaForCausalLM of 1 layer and " in card
    assert "16 of them are held out" in card
    assert f"| {report.measured[0].tokens_per_step:.2f} |" in card


def test_the_target_is_left_as_it_was(
    train: Callable[..., Any],
    target: LlamaForCausalLM,
    tmp_path: Path,
) -> None:
    before = {name: weight.clone() for name, weight in target.state_dict().items()}
    train(tmp_path, dataclasses.replace(TINY, epochs=0.2))
    assert all(torch.equal(weight, before[name]) for name, weight in target.state_dict().items())
    assert not any(weight.grad is not None for weight in target.parameters())


def test_a_killed_training_goes_on_as_if_it_had_not_been(
    train: Callable[..., Any], trained: tuple[Path, HeadReport], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = 0
    learn = loop.TrainingLoop._learn

    def dies(*args: Any) -> None:
        nonlocal calls
        calls += 1
        if calls > 11:
            raise KeyboardInterrupt
        learn(*args)

    with monkeypatch.context() as patch:
        patch.setattr(loop.TrainingLoop, "_learn", dies)
        with pytest.raises(KeyboardInterrupt):
            train(tmp_path)
    before = shard_path(tmp_path / "work", 0).stat().st_mtime_ns
    again, (folder, whole) = train(tmp_path), trained
    assert shard_path(tmp_path / "work", 0).stat().st_mtime_ns == before
    assert (again.num_steps, again.best_step, again.measured) == (whole.num_steps, whole.best_step, whole.measured)
    weights = [load_file(path / "model.safetensors") for path in (folder, tmp_path)]
    for name, weight in weights[0].items():
        assert torch.equal(weight, weights[1][name]), name


def test_counted_acceptance_is_that_of_drafting_token_by_token(trained: tuple[Path, HeadReport]) -> None:
    """A forward over whole texts finds what a draft finds that writes three tokens after each place."""
    folder, _ = trained
    draft, batch = AutoModelForCausalLM.from_pretrained(folder), batch_of(folder, 0)
    batch = batch.batch(torch.tensor([0]), batch.ids.device)
    with torch.no_grad():
        outcome = DraftRollout(draft, steps=3)(batch)
    ids, accepted, positions = batch.ids, torch.zeros(3, dtype=torch.long), 0
    first = batch.num_prompt_tokens
    for place in range(first, ids.shape[1]):
        positions += 1
        drafted = draft.generate(ids[:, :place], max_new_tokens=3, min_new_tokens=3, do_sample=False)[0, place:]
        for step, token in enumerate(drafted.tolist()):
            if place + step >= ids.shape[1] or token != int(ids[0, place + step]):
                break
            accepted[step] += 1
    assert outcome.accepted.tolist() == accepted.tolist()
    assert int(outcome.num_positions) == positions


def test_what_cannot_be_distilled_is_refused(train: Callable[..., Any], tmp_path: Path) -> None:
    tokenizer: Any = WordNumbers()
    with pytest.raises(UnsupportedModelError, match="decoder-only"):
        train_draft(build(FAMILIES["t5"]), tokenizer, ["1 2"], tmp_path, DraftTraining())
    with pytest.raises(ConfigError, match="`draft_layers` must be a whole number .* at most 3, but is 4"):
        train(tmp_path, DraftTraining(draft_layers=4))
    with pytest.raises(ConfigError, match="`draft_layers` must be a whole number of at least 1"):
        DraftTraining(draft_layers=0)
    bytes_only = build(FAMILIES["llama"])
    bytes_only.lm_head.weight = torch.nn.Parameter(bytes_only.lm_head.weight.to(torch.int8), requires_grad=False)
    with pytest.raises(ConfigError, match="`target` must have weights of at least 16 bits"):
        train_draft(bytes_only, tokenizer, ["1 2"], tmp_path, DraftTraining())
