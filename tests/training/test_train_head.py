"""A head learns, goes on after a kill as if there had been none, and drafts for its target."""

import copy
import dataclasses
import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as tf
from safetensors.torch import load_file
from transformers import LlamaForCausalLM, Trainer

import hf_specdec
from hf_specdec import AutoDraftHead, ConfigError
from hf_specdec.errors import CheckpointError, UnsupportedModelError
from hf_specdec.tools.train import HeadReport, HeadTraining, writing
from hf_specdec.tools.train.writing import read_texts
from tests.helpers.zoo import FAMILIES, build
from tests.training.conftest import CONFIG, PROMPTS, WordNumbers, train

Trained = tuple[Path, HeadReport]
SHORT: dict[str, Any] = {"max_steps": 2, "eval_steps": 2}


def weights_of(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "model.safetensors")


def test_a_head_learns_to_draft(trained: Trained) -> None:
    _, report = trained
    first, second, third = report.accepted
    assert 1.0 > first >= second >= third > 0.0
    assert report.tokens_per_step == pytest.approx(1.0 + first + second + third)
    assert report.tokens_per_step > 1.3
    assert 0 < report.best_step <= report.num_steps <= 28


def test_the_written_head_drafts_for_its_target(trained: Trained, target: LlamaForCausalLM) -> None:
    """By `AutoDraftHead` and `spec_method="eagle3"`; the text is plain generate's."""
    head, model = AutoDraftHead.from_pretrained(trained[0]), hf_specdec.enable(copy.deepcopy(target))
    prompt = torch.tensor([[int(word) for word in PROMPTS[0].split()]])
    settings: dict[str, Any] = {"max_new_tokens": 24, "do_sample": False, "return_dict_in_generate": True}
    out = model.generate(prompt, spec_method="eagle3", assistant_model=head, **settings)
    assert torch.equal(out.sequences, target.generate(prompt, **settings).sequences)
    assert out.spec_stats.mean_acceptance_length > 1.2


def test_the_written_head_has_the_speculators_format(trained: Trained) -> None:
    values = json.loads((trained[0] / "config.json").read_text())
    assert values["speculators_model_type"] == "eagle3"
    assert values["eagle_aux_hidden_state_layer_ids"] == [1, 2, 3]
    assert values["speculators_config"]["verifier"]["architectures"] == ["LlamaForCausalLM"]


def test_a_killed_training_goes_on_as_if_it_had_not_been(
    trained: Trained, target: LlamaForCausalLM, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Killed while texts are written and again while the head is trained: the same weights come out."""
    for owner, name, limit in ((writing, "_written", 1), (Trainer, "training_step", 12)):
        with monkeypatch.context() as patch:
            patch.setattr(owner, name, _dying(limit, getattr(owner, name)))
            with pytest.raises(KeyboardInterrupt):
                train(target, tmp_path)
    assert read_texts(tmp_path / "work" / "texts.jsonl") == read_texts(trained[0] / "work" / "texts.jsonl")
    assert train(target, tmp_path) == trained[1]
    expected, weights = weights_of(trained[0]), weights_of(tmp_path)
    assert all(torch.equal(weight, weights[name]) for name, weight in expected.items())


def _dying(limit: int, call: Callable[..., Any]) -> Callable[..., Any]:
    """`call`, which works `limit` times."""
    calls = 0

    def counted(*args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls > limit:
            raise KeyboardInterrupt
        return call(*args, **kwargs)

    return counted


def test_a_line_that_a_kill_left_unfinished_is_written_again(trained: Trained, tmp_path: Path) -> None:
    text = (trained[0] / "work" / "texts.jsonl").read_text()
    first, second, *_ = text.splitlines(keepends=True)
    file = tmp_path / "texts.jsonl"
    file.write_text(first + second[:-5])
    assert len(read_texts(file)) == 1
    assert file.read_text() == first
    file.write_text("[{]\n")
    with pytest.raises(CheckpointError, match=r"texts\.jsonl' cannot be read: .* Delete it"):
        read_texts(file)


def test_training_ends_when_acceptance_rises_no_more(target: LlamaForCausalLM, tmp_path: Path) -> None:
    config = dataclasses.replace(CONFIG, patience=2)
    report = train(target, tmp_path, config=config, eval_steps=2, learning_rate=1e-12)
    assert (report.num_steps, report.best_step) == (6, 2)


def test_the_target_stays_as_it_was(target: LlamaForCausalLM, tmp_path: Path) -> None:
    before = {name: weight.clone() for name, weight in target.state_dict().items()}
    train(target, tmp_path, **SHORT)
    assert all(torch.equal(weight, before[name]) for name, weight in target.state_dict().items())
    assert all(weight.requires_grad and weight.grad is None for weight in target.parameters())


def test_a_reduced_vocabulary_drafts_the_most_frequent_tokens(target: LlamaForCausalLM, tmp_path: Path) -> None:
    train(target, tmp_path, config=dataclasses.replace(CONFIG, draft_vocab_size=6), **SHORT)
    texts = [example for examples in read_texts(tmp_path / "work" / "texts.jsonl") for example in examples]
    counts = Counter(token for example in texts[round(len(texts) * CONFIG.held_out) :] for token in example.ids)
    ids = AutoDraftHead.from_pretrained(tmp_path).target_ids
    assert ids is not None and len(ids) == 6
    assert min(counts[int(token)] for token in ids) >= max(counts[token] for token in range(40) if token not in ids)


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"data": [*PROMPTS[1:], "3 4 5"]}, "data"),
        ({"config": dataclasses.replace(CONFIG, max_new_tokens=8)}, "max_new_tokens"),
        ({"config": dataclasses.replace(CONFIG, draft_vocab_size=8)}, "draft_vocab_size"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_work_of_other_settings_is_not_gone_on_with(
    change: dict[str, Any], field: str, trained: Trained, target: LlamaForCausalLM
) -> None:
    with pytest.raises(ConfigError, match=f"`{field}` must be .* to go on with the work in"):
        train(target, trained[0], **change)


def test_a_model_is_not_written_over(target: LlamaForCausalLM, tmp_path: Path) -> None:
    target.save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match="`out` must be a new folder or that of an earlier training"):
        train(target, tmp_path)


@pytest.mark.parametrize("family", ["gpt2", "bloom", "gemma3", "qwen3"])
def test_heads_have_the_shape_of_their_target(family: str, tmp_path: Path) -> None:
    target = build(FAMILIES[family])
    train(target, tmp_path, **SHORT)
    layer: Any = AutoDraftHead.from_pretrained(tmp_path).config.layer
    heads = target.config.num_attention_heads
    assert (layer.num_attention_heads, layer.hidden_size) == (heads, target.config.hidden_size)
    assert layer.head_dim == (getattr(target.config, "head_dim", None) or target.config.hidden_size // heads)


def test_embeddings_of_another_width_are_refused_before_a_text_is_written(tmp_path: Path) -> None:
    target = tf.OPTForCausalLM(tf.OPTConfig(**{**FAMILIES["opt"].options, "word_embed_proj_dim": 32}))
    with pytest.raises(UnsupportedModelError, match="OPTForCausalLM have 32 columns"):
        train(target, tmp_path)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("target", "path/to/target"),
        ("tokenizer", "path/to/target"),
        ("data", "1 2 3"),
        ("data", [1, 2]),
        ("data", ["1 2"]),
        ("config", {"num_texts": 128}),
        ("num_epochs", 3),
    ],
)
def test_an_argument_of_another_type_is_named(target: LlamaForCausalLM, tmp_path: Path, field: str, value: Any) -> None:
    arguments: dict[str, Any] = {"target": target, "tokenizer": WordNumbers(), "data": PROMPTS, "config": CONFIG}
    named = "training_arguments" if field == "num_epochs" else field
    with pytest.raises(ConfigError, match=f"`{named}` must be a|`{named}` must be what"):
        train(out=tmp_path / "out", **arguments | {field: value})
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("num_texts", 1),
        ("max_length", 128),
        ("max_new_tokens", 0),
        ("temperatures", ()),
        ("temperatures", (float("nan"),)),
        ("temperatures", 0.7),
        ("layer_ids", ("low",)),
        ("draft_vocab_size", 0),
        ("step_decay", "0.8"),
        ("held_out", 0.9),
        ("patience", 0),
    ],
)
def test_settings_out_of_range_are_refused(field: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=field):
        HeadTraining(**{field: value})
