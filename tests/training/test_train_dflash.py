"""Training a DFlash or a DSpark head: it learns, goes on after a kill, is saved as others read it, and drafts."""

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import GenerationMixin, LlamaForCausalLM

import hf_specdec
from hf_specdec.engine.head_pairing import output_head
from hf_specdec.errors import ConfigError
from hf_specdec.methods.dflash.checkpoint import load_head
from hf_specdec.methods.dflash.network import DFlashHead
from hf_specdec.tools.train import DFlashTraining, HeadReport, loop, train_draft
from hf_specdec.tools.train.batch import Texts
from hf_specdec.tools.train.block_rollout import BlockRollout
from hf_specdec.tools.train.texts import read_shard, shard_path
from tests.training.conftest import PROMPTS, SETTINGS, WordNumbers

KINDS = {"dflash": DFlashTraining(**SETTINGS, block_size=6), "dspark": DFlashTraining(**SETTINGS, markov_rank=4)}


@pytest.fixture(scope="module")
def train(target: LlamaForCausalLM) -> Callable[..., Any]:
    tokenizer: Any = WordNumbers()
    return lambda out, config: train_draft(target, tokenizer, PROMPTS, out, config)


@pytest.fixture(scope="module", params=KINDS)
def trained(
    request: pytest.FixtureRequest, train: Callable[..., Any], tmp_path_factory: pytest.TempPathFactory
) -> tuple[str, Path, HeadReport]:
    folder = tmp_path_factory.mktemp(request.param)
    return request.param, folder, train(folder, KINDS[request.param])


def rollout_of(head: DFlashHead, target: LlamaForCausalLM, blocks: int = 40) -> BlockRollout:
    return BlockRollout(
        head, target.get_input_embeddings(), output_head(target), steps=3, blocks=blocks, decay=0.8
    ).eval()


def batch_of(folder: Path, index: int) -> Texts:
    return read_shard(folder / "work", index)


def test_a_head_learns_to_draft(trained: tuple[str, Path, HeadReport], target: LlamaForCausalLM) -> None:
    _, _, report = trained
    greedy, sampled = report.measured
    assert (greedy.temperature, sampled.temperature) == (0.0, 0.7)
    assert report.best_step > 0
    assert greedy.tokens_per_step > 1.5
    assert all(later <= earlier for earlier, later in zip(greedy.rates, greedy.rates[1:], strict=False))


def test_it_is_saved_in_the_authors_form_with_a_card(trained: tuple[str, Path, HeadReport]) -> None:
    kind, folder, report = trained
    values = json.loads((folder / "config.json").read_text())
    assert values["architectures"] == [{"dflash": "DFlashDraftModel", "dspark": "Qwen3DSparkModel"}[kind]]
    assert (values["model_type"], values["num_target_layers"]) == ("qwen3", 4)
    own = values["dflash_config"] if kind == "dflash" else values
    assert own["target_layer_ids"] == [0, 1, 2]
    assert (folder / "mask_embedding.pt").exists()
    assert not {"lm_head.weight", "embed_tokens.weight"} & load_file(folder / "model.safetensors").keys()
    card = (folder / "README.md").read_text()
    assert f"{'DFlash' if kind == 'dflash' else 'DSpark'} head for LlamaForCausalLM" in card
    assert f"| {report.measured[0].tokens_per_step:.2f} |" in card


def test_calls_accept_its_drafts(trained: tuple[str, Path, HeadReport], target: LlamaForCausalLM) -> None:
    """On held-out prompts: the texts stay, and several times as many tokens are right as by chance, one in forty."""
    _, folder, _ = trained
    head = hf_specdec.AutoDraftHead.from_pretrained(folder)
    batch = batch_of(folder, 0)
    model = hf_specdec.enable(target)
    accepted = steps = 0
    for ids in batch.ids:
        prompt = ids[None, : batch.num_prompt_tokens]
        kwargs: dict[str, Any] = {"max_new_tokens": 20, "do_sample": False}
        output = model.generate(
            prompt,
            **kwargs,
            spec_method="dflash",
            assistant_model=head,
            spec_config={"confidence_threshold": 0.0, "draft_len": 3},
            return_dict_in_generate=True,
        )
        assert torch.equal(output.sequences, GenerationMixin.generate(model, prompt, **kwargs))
        accepted += output.spec_stats.num_accepted_tokens
        steps += output.spec_stats.num_drafts
    hf_specdec.disable(model)
    assert accepted / steps > 0.15


def test_chains_are_counted_as_they_are_drafted(
    trained: tuple[str, Path, HeadReport], target: LlamaForCausalLM
) -> None:
    """Each block by itself, token by token after its own drafts, accepts as many tokens as are counted."""
    _, folder, _ = trained
    head, batch = load_head(folder).float(), batch_of(folder, 1)
    rollout = rollout_of(head, target)
    with torch.no_grad():
        anchors, used = rollout._anchors(batch)
        states = rollout._states(batch, anchors)
        counted = rollout(batch)
        rates = torch.zeros(3, dtype=torch.long)
        for row in range(len(anchors)):
            for place in range(anchors.shape[1]):
                if not used[row, place]:
                    continue
                anchor, memory = int(anchors[row, place]), states.new_zeros((1, head.memory_size or 0))
                token = batch.ids[row, anchor]
                for step in range(3):
                    state = states[row, place, step][None]
                    logits = output_head(target)(state)
                    if head.memory_size is not None:
                        logits, memory = head.after(logits, token[None], state, memory)
                    token = logits.argmax()
                    following = anchor + 1 + step
                    if following >= batch.ids.shape[1] or token != batch.ids[row, following]:
                        break
                    rates[step] += 1
    assert counted.accepted.tolist() == rates.tolist()
    assert int(counted.num_positions) == int(used.sum())


def test_blocks_see_the_text_before_them_alone(trained: tuple[str, Path, HeadReport], target: LlamaForCausalLM) -> None:
    """What stands behind a block's first token, and other blocks, change nothing of it."""
    _, folder, _ = trained
    head, batch = load_head(folder).float(), batch_of(folder, 1)
    rollout = rollout_of(head, target)
    anchors = torch.tensor([[6, 12, 18]]).expand(len(batch.ids), -1)
    changed = Texts(
        torch.cat([batch.ids[:, :13], batch.ids[:, 13:].flip(1)], dim=1),
        torch.cat([batch.features[:, :12], torch.randn_like(batch.features[:, 12:])], dim=1),
        *(batch.top_ids, batch.top_probabilities, batch.real, batch.num_prompt_tokens),
    )
    with torch.no_grad():
        together = rollout._states(batch, anchors)
        torch.testing.assert_close(rollout._states(changed, anchors)[:, :2], together[:, :2])
        torch.testing.assert_close(rollout._states(batch, anchors[:, 1:2]), together[:, 1:2])
        assert not torch.allclose(rollout._states(changed, anchors)[:, 2], together[:, 2])


def test_measured_blocks_are_spread_and_trained_ones_drawn(
    trained: tuple[str, Path, HeadReport], target: LlamaForCausalLM
) -> None:
    _, folder, _ = trained
    batch = batch_of(folder, 1)
    batch.real[0, 9:] = False  # a text that ends early: tokens 4 to 8 are written
    rollout = rollout_of(load_head(folder).float(), target, blocks=7)
    anchors, used = rollout._anchors(batch)
    assert anchors[0][used[0]].tolist() == [3, 4, 5, 6, 7]
    assert anchors[1].tolist() == [3 + place * 20 // 7 for place in range(7)]
    rollout.train()
    torch.manual_seed(0)
    first, used = rollout._anchors(batch)
    assert sorted(first[0][used[0]].tolist()) == [3, 4, 5, 6, 7]
    assert len(set(first[1].tolist())) == 7
    assert not torch.equal(first, rollout._anchors(batch)[0])


def test_a_killed_training_goes_on_as_if_it_had_not_been(
    train: Callable[..., Any],
    trained: tuple[str, Path, HeadReport],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    kind, folder, whole = trained
    real, calls = loop.TrainingLoop._learn, 0

    def dies(self: Any, batch: Texts) -> None:
        nonlocal calls
        calls += 1
        if calls > 11:
            raise KeyboardInterrupt
        real(self, batch)

    with monkeypatch.context() as patch:
        patch.setattr(loop.TrainingLoop, "_learn", dies)
        with pytest.raises(KeyboardInterrupt):
            train(tmp_path, KINDS[kind])
    before = shard_path(tmp_path / "work", 0).stat().st_mtime_ns
    again = train(tmp_path, KINDS[kind])
    assert shard_path(tmp_path / "work", 0).stat().st_mtime_ns == before
    assert (again.num_steps, again.best_step, again.measured) == (whole.num_steps, whole.best_step, whole.measured)
    weights = [load_file(path / "model.safetensors") for path in (folder, tmp_path)]
    for name, weight in weights[0].items():
        assert torch.equal(weight, weights[1][name]), name


def test_the_target_is_left_as_it_was(
    trained: tuple[str, Path, HeadReport], target: LlamaForCausalLM, train: Callable[..., Any], tmp_path: Path
) -> None:
    """No gradients are left at its weights, which take some again."""
    kind, _, _ = trained
    before = {name: weight.clone() for name, weight in target.state_dict().items()}
    train(tmp_path, dataclasses.replace(KINDS[kind], epochs=0.2))
    assert all(torch.equal(weight, before[name]) for name, weight in target.state_dict().items())
    assert all(weight.requires_grad and weight.grad is None for weight in target.parameters())


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"block_size": 1}, "`block_size` must be a whole number of at least 2"),
        ({"block_size": 4, "rollout_steps": 4}, "`rollout_steps` must be at most 3, what a block drafts"),
        ({"layer_ids": (0, 2)}, "`layer_ids` must be a whole number of at least 1"),
        ({"markov_rank": -1}, "`markov_rank` must be a whole number of at least 0"),
        ({"blocks_per_text": 0}, "`blocks_per_text` must be"),
        ({"draft_layers": 0}, "`draft_layers` must be"),
    ],
)
def test_settings_that_do_not_fit(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        DFlashTraining(**fields)
