"""Training of the embedded pair: what counts as a loop, whose texts the draft learns from, and training on."""

import json

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, models
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

from demos.train_embedded import __main__ as script
from demos.train_embedded import evaluate, fit, loops, objectives
from demos.train_embedded.loop_free import LoopFreeText, loop_free_texts, stream_of_loop_free_texts
from demos.train_embedded.models import new_model
from demos.train_embedded.own_texts import own_texts
from hf_specdec.tools.command_errors import run_program
from hf_specdec.tools.train import optimiser


@pytest.fixture
def target():
    torch.manual_seed(0)
    return new_model("draft", vocab_size=64).eval()


def test_a_loop_is_a_piece_that_stands_three_times_in_a_row():
    text = torch.tensor([[9, 8, 7, *[1, 2, 3, 4] * 4, 5], [*range(20)]])
    mask = loops.loop_mask(text)
    assert mask[0].nonzero().flatten().tolist() == [14, 15, 16, 17, 18]  # where the third time ends, and what follows
    assert not mask[1].any()
    assert not loops.loop_mask(torch.tensor([[1, 2, 1, 2, 1, 2, 3]])).any()  # six tokens are too few


@pytest.mark.parametrize("period", [2, 3, 5, 20, 48])
def test_a_loop_has_a_period(period):
    piece = torch.arange(1, period + 1)
    text = torch.cat([torch.tensor([60, 61]), piece.repeat(10)])[: 2 + 4 * max(period, 3)]
    periods = loops.loop_periods(text[None])[0]
    assert periods.unique().tolist() == [0, period]
    assert int((periods > 0).int().argmax()) == 2 + max(3 * period, 8) - 1  # the last token of the third copy


def test_a_text_is_led_out_of_each_loop_where_another_token_is_nearest(target):
    """Everywhere else it is what the model writes greedily."""
    prompts = torch.randint(64, (4, 8), generator=torch.Generator().manual_seed(0))
    with_loops = target.generate(prompts, max_new_tokens=60, do_sample=False, eos_token_id=None)
    periods = loops.loop_periods(with_loops[:, 8:])
    assert (periods > 0).any(1).all()  # as an untrained model writes
    texts = loop_free_texts(target, prompts, 60, most_loops=60)
    ids = torch.tensor([text.ids for text in texts])
    assert torch.equal(ids[:, :8], prompts) and ids.shape == (4, 68)
    assert not loops.loop_mask(ids[:, 8:]).any()
    with torch.no_grad():
        scores, looping = target(ids).logits, target(with_loops).logits
    for row, text in enumerate(texts):
        found, last = periods[row], int((periods[row] > 0).int().argmax()) + 8
        copy = torch.arange(last + 1 - max(int(found[last - 8]), 4), last + 1)
        gaps = looping[row, copy - 1].topk(2).values.diff()[:, 0]
        assert text.avoided[0] == (int(copy[gaps.argmax()]), int(with_loops[row, copy[gaps.argmax()]]))
        for place, token in text.avoided:
            scores[row, place - 1, token] = -torch.inf
    assert torch.equal(scores[:, 7:-1].argmax(-1), ids[:, 8:])
    assert all(text.avoided for text in texts)


def test_an_avoided_token_that_is_unlikely_already_adds_nothing(target, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(objectives, "computes_bf16", lambda device: False)  # whose rounding differs by a thousandth
    batch = torch.arange(32)[None]
    with torch.no_grad():
        order = target(batch).logits[0, 19].argsort(descending=True)
        plain = objectives.next_token(target, batch)
        likely, unlikely = (
            objectives.unloop(target, batch, [LoopFreeText(batch[0].tolist(), [(20, int(token))])], weight=100.0)
            for token in (order[0], order[-1])
        )
        own = target(batch).logits[0, 19].softmax(-1)
    torch.testing.assert_close(unlikely, plain)
    wanted = own.clone()
    wanted[order[0]] = 0.6 * own[order[1]]
    wanted /= wanted.sum()
    divergence = (wanted * (wanted / own).log()).sum()
    torch.testing.assert_close(likely - plain, 100 * divergence / 32, rtol=1e-3, atol=1e-5)


def test_a_model_learns_to_leave_loops(target):
    """It loops less, and learns the batch next to it."""
    tokens = np.random.default_rng(0).integers(64, size=4000).astype(np.uint16)
    batch = torch.from_numpy(tokens[:256].astype(np.int64).reshape(4, 64))
    prompts = torch.from_numpy(tokens[1000:1256].astype(np.int64).reshape(32, 8))

    def looping():
        text = target.generate(prompts, max_new_tokens=40, do_sample=False, eos_token_id=None)
        return loops.loop_mask(text[:, 8:]).any(1).float().mean().item()

    before, loss_before = looping(), objectives.next_token(target, batch)
    texts = stream_of_loop_free_texts(target, tokens, rows=16, at_once=16, every=2, prompt_length=8, new_tokens=40)
    optimiser = torch.optim.AdamW(target.parameters(), lr=2e-3)
    for _ in range(30):
        loss = objectives.unloop(target, batch, next(texts), weight=100.0)
        optimiser.zero_grad(), loss.backward(), optimiser.step()
    assert looping() < before - 0.3
    assert objectives.next_token(target, batch) < loss_before


def test_half_of_the_own_texts_are_greedy(target):
    tokens = np.random.default_rng(0).integers(64, size=500).astype(np.uint16)
    texts = own_texts(target, tokens, num_texts=4, prompt_length=8, new_tokens=6, rows=2).reshape(4, 14)
    prompts = torch.from_numpy(texts[:, :8].astype(np.int64))
    greedy = target.generate(prompts, max_new_tokens=6, do_sample=False, eos_token_id=None)
    same = (greedy.numpy() == texts).all(1).tolist()
    assert same == [True, True, False, False]


@pytest.mark.wide
@pytest.mark.parametrize(("stage", "trained", "kept"), [("draft", "draft", "target"), ("unloop", "target", "draft")])
def test_a_stage_of_its_own_trains_given_models_on(tmp_path, target, monkeypatch, stage, trained, kept):
    """One model learns, the other stays as it was, and a second run finds the work done."""
    start, work = tmp_path / "start", tmp_path / "work"
    vocabulary = {chr(65 + place): place for place in range(64)}
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.BPE(vocabulary, [])), eos_token="A", pad_token="A"
    )
    for name in ("target", "draft"):
        target.save_pretrained(start / name)
        tokenizer.save_pretrained(start / name)
    work.mkdir()
    tokenizer.save_pretrained(work / "tokenizer")
    for name in ("train", "held_out"):
        np.save(work / f"{name}.npy", np.random.default_rng(1).integers(64, size=2000).astype(np.uint16))
    monkeypatch.setattr(script, "NUM_OWN_TEXTS", 2)
    monkeypatch.setattr(script, "WINDOW", 32)
    monkeypatch.setattr(evaluate, "NUM_PROMPTS", 8)
    monkeypatch.setattr(evaluate, "NEW_TOKENS", 8)
    options = {"work": work, "export": tmp_path / "out", "start": start, "stages": [script.Stage(stage)], "threads": 1}
    script.main(**options, minutes=0.01)
    before, after = (LlamaForCausalLM.from_pretrained(folder / trained) for folder in (start, tmp_path / "out"))
    assert not torch.equal(before.lm_head.weight, after.lm_head.weight)
    other = LlamaForCausalLM.from_pretrained(tmp_path / "out" / kept)
    assert torch.equal(other.lm_head.weight, before.lm_head.weight.to(torch.bfloat16))
    report = json.loads((tmp_path / "out" / "report.json").read_text())
    script.main(**options, minutes=0.01)
    assert json.loads((tmp_path / "out" / "report.json").read_text()) == report


def test_a_stage_iterates_in_fp32_where_bf16_is_slow_and_goes_on_from_a_state_of_torchs_muon(
    tmp_path, target, monkeypatch
):
    dtypes, orthogonal = set(), optimiser.orthogonal
    monkeypatch.setattr(optimiser, "computes_bf16", lambda device: False)
    monkeypatch.setattr(
        optimiser, "orthogonal", lambda matrix, *, dtype: dtypes.add(dtype) or orthogonal(matrix, dtype=dtype)
    )
    ours, others = fit._optimisers(target, 0.02, 2e-3)
    torchs = torch.optim.Muon(ours.param_groups[0]["params"], lr=0.02, weight_decay=0.01)
    torchs.param_groups[0]["peak_lr"] = 0.02
    target(torch.arange(8)[None], labels=torch.arange(8)[None]).loss.backward()
    torchs.step(), others.step()
    checkpoint = tmp_path / "draft.pt"
    fit._save(checkpoint, target, [torchs, others], 0.0, 7)
    target.zero_grad()
    batches = iter(lambda: torch.arange(16)[None], None)
    fit.fit(
        target,
        lambda batch: target(batch, labels=batch).loss,
        batches,
        checkpoint=checkpoint,
        minutes=1e-5,
        matrix_lr=0.02,
        other_lr=2e-3,
        evaluate=dict,
    )
    assert torch.load(checkpoint, weights_only=True)["step"] > 7
    assert dtypes == {torch.float32}


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--device", "gpu"], "`--device` must be a device that is here"),
        (["--device", "cuda:99"], "`--device` must be a device that is here"),
        (["--minutes", "nan"], "`--minutes` must be above 0, but is nan."),
        (["--start", "no/such"], "`--start` must hold a model in target/, but is 'no/such'."),
        (["--export", __file__], "`--export` must be a folder"),
    ],
    ids=lambda value: " ".join(value)[:20] if isinstance(value, list) else "",
)
def test_what_cannot_work_is_said_before_anything_is_made(capsys, monkeypatch, tmp_path, words, told):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as ended:
        run_program(script.main, ["--work", "work", "--export", "out", *words])
    assert ended.value.code == 2
    assert capsys.readouterr().err.startswith(f"error: {told}")
    assert not any(tmp_path.iterdir())
