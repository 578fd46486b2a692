"""Training a head: it learns, goes on after a kill as if there had been none, and is saved with what was measured."""

import dataclasses
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import DynamicCache, LlamaForCausalLM, PreTrainedTokenizerFast

from hf_specdec.errors import ConfigError
from hf_specdec.methods.eagle3.checkpoint import load_head
from hf_specdec.tools.train import HeadReport, HeadTraining, loop, train_draft, writing
from hf_specdec.tools.train.batch import Texts
from hf_specdec.tools.train.rollout import HeadRollout
from hf_specdec.tools.train.texts import read_shard, shard_path
from tests.training.conftest import PROMPTS, SETTINGS, WordNumbers

TINY = HeadTraining(**SETTINGS)


@pytest.fixture(scope="module")
def train(target: LlamaForCausalLM) -> Callable[..., Any]:
    tokenizer: Any = WordNumbers()
    return lambda out, config=TINY, prompts=PROMPTS, **kwargs: train_draft(
        target, tokenizer, prompts, out, config, **kwargs
    )


@pytest.fixture(scope="module")
def trained(train: Callable[..., Any], tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, HeadReport]:
    """One training that ran to its end, its folder and report."""
    folder = tmp_path_factory.mktemp("trained")
    return folder, train(folder)


def test_a_head_learns_to_draft(trained: tuple[Path, HeadReport]) -> None:
    """Three epochs over 32 texts: more than half of a greedy text's tokens are drafted."""
    _, report = trained
    greedy, sampled = report.measured
    assert (greedy.temperature, sampled.temperature) == (0.0, 0.7)
    assert greedy.tokens_per_step > 1.6
    assert all(0.0 <= later <= earlier <= 1.0 for earlier, later in zip(greedy.rates, greedy.rates[1:], strict=False))


def test_the_saved_head_is_in_the_speculators_format_with_a_card(trained: tuple[Path, HeadReport]) -> None:
    tmp_path, report = trained
    values = json.loads((tmp_path / "config.json").read_text())
    assert values["speculators_model_type"] == "eagle3"
    assert values["eagle_aux_hidden_state_layer_ids"] == [1, 2, 3]
    assert values["speculators_config"]["verifier"]["architectures"] == ["LlamaForCausalLM"]
    head = load_head(tmp_path)
    assert head.embed_tokens is None
    assert head.config.draft_vocab_size == 40
    card = (tmp_path / "README.md").read_text()
    assert f"{report.num_steps:,} steps of 4 texts" in card
    assert f"| {report.measured[0].tokens_per_step:.2f} |" in card
    assert "48 texts" in card
    assert "16 of them are held out" in card


def test_a_killed_training_goes_on_as_if_it_had_not_been(
    train: Callable[..., Any], trained: tuple[Path, HeadReport], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Killed in the middle of a shard and again in the middle of training: the same weights come out."""
    calls = 0

    def dies_at(limit: int, call: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*args: Any, **kwargs: Any) -> Any:
            nonlocal calls
            calls += 1
            if calls > limit:
                raise KeyboardInterrupt
            return call(*args, **kwargs)

        return counted

    for name, owner, limit in (("write_shard", writing, 3), ("_learn", loop.TrainingLoop, 11)):
        calls = 0
        with monkeypatch.context() as patch:
            patch.setattr(owner, name, dies_at(limit, getattr(owner, name)))
            with pytest.raises(KeyboardInterrupt):
                train(tmp_path / "killed")
    first = shard_path(tmp_path / "killed" / "work", 0)
    before = first.stat().st_mtime_ns
    again, (folder, whole) = train(tmp_path / "killed"), trained
    assert first.stat().st_mtime_ns == before
    assert (again.num_steps, again.best_step, again.measured) == (whole.num_steps, whole.best_step, whole.measured)
    weights = [load_file(path / "model.safetensors") for path in (folder, tmp_path / "killed")]
    for name, weight in weights[0].items():
        assert torch.equal(weight, weights[1][name]), name


def test_training_stops_when_acceptance_rises_no_more(train: Callable[..., Any], tmp_path: Path) -> None:
    config = HeadTraining(
        **{name: getattr(TINY, name) for name in ("num_texts", "prompt_tokens", "new_tokens", "texts_per_shard")},
        learning_rate=1e-12,
        patience=2,
        eval_every=2,
        batch_size=4,
        rollout_steps=2,
    )
    report = train(tmp_path, config)
    assert (report.num_steps, report.best_step) == (4, 0)


def test_a_trained_head_is_trained_on(
    train: Callable[..., Any], trained: tuple[Path, HeadReport], tmp_path: Path
) -> None:
    """It begins with what it has learned, and goes on with that."""
    folder, first = trained
    config = dataclasses.replace(TINY, epochs=1.0, eval_every=100, learning_rate=1e-3)
    report = train(tmp_path / "still", dataclasses.replace(config, learning_rate=1e-12), head=load_head(folder))
    assert (report.best_step, report.measured) == (0, first.measured)
    later = train(tmp_path / "more", config, head=load_head(folder))
    assert later.loss < first.loss


def test_the_target_takes_no_gradients(train: Callable[..., Any], target: LlamaForCausalLM, tmp_path: Path) -> None:
    train(tmp_path, dataclasses.replace(TINY, epochs=0.2))
    assert all(weight.requires_grad and weight.grad is None for weight in target.parameters())


def test_the_shape_of_a_head_that_is_trained_on_stays(
    train: Callable[..., Any], trained: tuple[Path, HeadReport], tmp_path: Path
) -> None:
    config = dataclasses.replace(TINY, layer_ids=(1, 2, 3))
    with pytest.raises(ConfigError, match="`layer_ids` must be None where a head is trained on"):
        train(tmp_path, config, head=load_head(trained[0]))


@pytest.mark.wide
def test_several_prompt_lengths_take_turns_at_each_temperature(train: Callable[..., Any], tmp_path: Path) -> None:
    config = dataclasses.replace(TINY, prompt_tokens=(2, 6), epochs=0.1)
    train(tmp_path, config)
    written = [read_shard(tmp_path / "work", index) for index in range(config.num_shards)]
    assert [(shard.temperature, shard.num_prompt_tokens) for shard in written] == [
        (0.0, 2), (0.7, 2), (0.0, 6), (0.7, 6), (0.0, 2), (0.7, 2)
    ]  # fmt: skip


def test_work_of_other_settings_is_not_gone_on_with(train: Callable[..., Any], tmp_path: Path) -> None:
    (tmp_path / "work").mkdir()
    (tmp_path / "work" / "settings.json").write_text(json.dumps({"num_texts": 3}))
    with pytest.raises(ConfigError, match=r"`num_texts` must be 3 to go on .*, but is 48"):
        train(tmp_path)


def test_work_on_other_prompts_is_not_gone_on_with(train: Callable[..., Any], tmp_path: Path) -> None:
    """As many of them."""
    config = dataclasses.replace(TINY, epochs=0.1)
    train(tmp_path, config)
    with pytest.raises(ConfigError, match=r"`prompts` must be '78 pieces, of digest .*' to go on with the work in"):
        train(tmp_path, config, [*PROMPTS[1:], "3 4 5"])


def test_a_kill_while_the_settings_are_written_leaves_none_of_them(
    train: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def kill(descriptor: int) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("os.fsync", kill)
        with pytest.raises(KeyboardInterrupt):
            train(tmp_path)
    assert list((tmp_path / "work").iterdir()) == []


@pytest.mark.wide
def test_the_target_writes_from_its_first_token_without_prompts(train: Callable[..., Any], tmp_path: Path) -> None:
    train(tmp_path, prompts=None)
    shard = read_shard(tmp_path / "work", 0)
    assert shard.num_prompt_tokens == 1
    assert shard.temperature == 0.7
    assert len({tuple(ids) for ids in shard.ids.tolist()}) > 1
    assert shard.ids[:, 0].tolist() == [1] * 8
    assert shard.ids.shape == (8, 21)


@pytest.mark.wide
def test_a_reduced_vocabulary_drafts_the_most_frequent_tokens(train: Callable[..., Any], tmp_path: Path) -> None:
    config = dataclasses.replace(TINY, draft_vocab_size=6)
    train(tmp_path, config)
    learned = [read_shard(tmp_path / "work", i) for i in range(config.num_held_out_shards, config.num_shards)]
    counts = sum(torch.bincount(shard.ids[shard.real], minlength=40) for shard in learned)
    head = load_head(tmp_path)
    ids = head.target_ids
    assert ids.tolist() == sorted(ids.tolist())
    others = torch.ones(40, dtype=torch.bool).index_fill(0, ids, False)
    assert counts[ids].min() >= counts[others].max()


def test_hidden_states_and_distributions_on_disk_are_the_targets(
    trained: tuple[Path, HeadReport], target: LlamaForCausalLM
) -> None:
    shard = read_shard(trained[0] / "work", 1)
    with torch.no_grad():
        outputs = target(shard.ids[:1], output_hidden_states=True)
    expected = torch.cat([outputs.hidden_states[i] for i in (1, 2, 3)], dim=-1)
    torch.testing.assert_close(shard.features[:1].float(), expected, atol=0.02, rtol=0.02)
    probabilities = outputs.logits.softmax(-1).gather(-1, shard.top_ids[:1])
    torch.testing.assert_close(shard.top_probabilities[:1].float(), probabilities, atol=0.01, rtol=0.01)
    assert shard.temperature == 0.7


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("num_texts", 10),
        ("prompt_tokens", ()),
        ("prompt_tokens", (64, 0)),
        ("temperatures", ()),
        ("held_out", 0.9),
        ("minutes", 0.0),
        ("epochs", "8"),
        ("epochs", math.inf),
        ("epochs", 1e308),
        ("learning_rate", math.inf),
        ("learning_rate", math.nan),
        ("temperatures", (0.0, math.nan)),
        ("temperatures", ("0.7",)),
        ("temperatures", 0.7),
        ("layer_ids", 3),
        ("layer_ids", ("low",)),
        ("draft_vocab_size", 0),
        ("draft_vocab_size", "all"),
        ("step_decay", math.nan),
        ("step_decay", "0.8"),
        ("held_out", "0.1"),
        ("seed", -1),
        ("seed", 1 << 64),
        ("mixed_precision", "fp8"),
        ("batch_size", 65),
    ],
)
def test_settings_out_of_range_are_refused(field: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=field):
        HeadTraining(**{field: value})


def test_layers_that_the_target_lacks_are_refused(train: Callable[..., Any], tmp_path: Path) -> None:
    config = HeadTraining(num_texts=128, layer_ids=(1, 2, 9))
    with pytest.raises(ConfigError, match=r"from 0 to 4, the target's number of layers, but is \(1, 2, 9\)"):
        train(tmp_path, config)


@pytest.mark.parametrize("num_prompt_tokens", [0, 1, 4])
def test_counted_acceptance_is_that_of_drafting_token_by_token(
    trained: tuple[Path, HeadReport], num_prompt_tokens: int
) -> None:
    """The rollout over whole texts finds what a head finds that drafts from one position after the other."""
    head, shard = load_head(trained[0]), read_shard(trained[0] / "work", 0)
    ids, features = shard.ids[:1], shard.features[:1]
    target_embedding = torch.nn.Embedding(40, 32)
    rollout = HeadRollout(head, target_embedding, steps=3, decay=1.0)
    fields = (shard.top_ids[:1], shard.top_probabilities[:1], shard.real[:1])
    with torch.no_grad():
        outcome = rollout(Texts(ids, features, *fields, num_prompt_tokens))
        accepted = torch.zeros(3, dtype=torch.long)
        fused = head.fuse(features.float())
        starts = range(max(num_prompt_tokens, 1), ids.shape[1] - 1)
        for start in starts:  # the pairs 1..start are known; the chain begins after them
            cache = DynamicCache()
            states = fused[:, :start]
            tokens = ids[:, 1 : start + 1]
            positions = torch.arange(1, start + 1)[None]
            for step in range(3):
                width = cache.get_seq_length() + tokens.shape[1]
                mask = torch.ones(tokens.shape[1], width).tril(width - tokens.shape[1]).bool()[None, None]
                states = head(target_embedding(tokens), states, positions, mask, cache)[:, -1:]
                token = int(head.target_ids[head.logits(states)[0, -1].argmax()])
                place = start + 1 + step
                if place >= ids.shape[1] or token != int(ids[0, place]):
                    break
                accepted[step] += 1
                tokens, positions = ids[:, place : place + 1], positions[:, -1:] + 1
    assert outcome.accepted.tolist() == accepted.tolist()
    assert int(outcome.num_positions) == len(starts)


def test_the_tokenizer_of_a_real_model_makes_prompts_of_its_texts() -> None:
    from hf_specdec import embedded
    from hf_specdec.tools.train.texts import prompt_ids

    tokenizer = PreTrainedTokenizerFast.from_pretrained(embedded.path("target"))
    text = "import os\n" * 40
    pieces = prompt_ids([text, ""], tokenizer, 16, HeadTraining())
    assert all(1 <= len(piece) <= 16 for piece in pieces)
    together = [token for piece in pieces for token in piece]
    assert together == tokenizer(text)["input_ids"][: len(together)]
    with pytest.raises(ConfigError, match="prompts"):
        prompt_ids(["", ""], tokenizer, 16, HeadTraining())
