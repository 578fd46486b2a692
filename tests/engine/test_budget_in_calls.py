"""Whole calls on a clock of the test: what draft networks and random numbers take is weighed apart."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

import hf_specdec
from hf_specdec import embedded
from hf_specdec.engine import step
from hf_specdec.engine.cost.budget import Budget
from hf_specdec.engine.sampling import noise_ahead
from hf_specdec.forward.model_runner import ModelRunner
from hf_specdec.forward.networks import runner_base
from hf_specdec.forward.networks.head_runner import HeadRunner

ONE, READING, FORWARD = 0.01, 3.0, 0.03  # seconds of a target's forward, of the head's first one and of its others


class Clock:
    """Time passes in forwards alone, whatever they compute."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now, self.num_asked = 0.0, 0
        target, head = ModelRunner.forward, HeadRunner.score

        def forward(runner: ModelRunner, *args: Any) -> Any:
            self.now += ONE
            return target(runner, *args)

        def score(runner: HeadRunner, *args: Any) -> Any:
            self.now += FORWARD if self.num_asked else READING
            self.num_asked += 1
            return head(runner, *args)

        monkeypatch.setattr(ModelRunner, "forward", forward)
        monkeypatch.setattr(HeadRunner, "score", score)
        for module in (step, runner_base):
            monkeypatch.setattr(module, "time", SimpleNamespace(perf_counter=lambda: self.now))


@pytest.mark.wide
def test_a_slow_head_does_not_stop_the_other_sources(tokenizer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its first forward takes as long as 300 steps, the others as long as three, and its size promises less."""
    prompt = tokenizer("def add(a, b):\n    return a + b\n\n\ndef add_all(a, b):\n", return_tensors="pt").input_ids
    drafted, wanted, texts = {}, {}, []
    for name in ("alone", "with a head"):
        model = hf_specdec.AutoModelForCausalLM.from_pretrained(embedded.path("target"), precision="fp32")
        head = hf_specdec.AutoDraftHead.from_pretrained(embedded.path("head"))
        how: dict[str, Any] = {} if name == "alone" else {"assistant_model": head}
        with monkeypatch.context() as patched:
            clock = Clock(patched)
            model.generate(prompt, max_new_tokens=32, do_sample=False, spec_method="auto")  # learns what steps cost
            out = model.generate(
                prompt,
                max_new_tokens=96,
                do_sample=False,
                spec_method="auto",
                spec_config={"pool": "request"},
                return_dict_in_generate=True,
                **how,
            )
        drafted[name], wanted[name] = out.spec_stats.num_draft_tokens, clock.num_asked
        texts.append(out.sequences)
    expected = model.generate(prompt, max_new_tokens=96, do_sample=False)
    assert all(torch.equal(text, expected) for text in texts)
    assert wanted["alone"] == 0
    assert 0 < wanted["with a head"] < 10, "it costs more than it gains"
    assert drafted["with a head"] > 0.7 * drafted["alone"] > 20


def test_random_numbers_are_no_reason_against_drafts(tokenizer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each token is drawn with a row of them, which a draft may only have made sooner."""
    model = hf_specdec.AutoModelForCausalLM.from_pretrained(embedded.path("target"), precision="fp32")
    prompt = tokenizer("def add(a, b):\n    return a + b\n", return_tensors="pt").input_ids
    clock, recorded = Clock(monkeypatch), []
    exponential, record = noise_ahead._exponential, Budget.record

    def slow(*args: Any) -> torch.Tensor:
        clock.now += 1.0
        return exponential(*args)

    def listen(budget: Budget, *args: Any, **kwargs: Any) -> None:
        recorded.append(kwargs["seconds"] + kwargs["draft_seconds"])
        record(budget, *args, **kwargs)

    monkeypatch.setattr(noise_ahead, "_exponential", slow)
    monkeypatch.setattr(Budget, "record", listen)
    monkeypatch.setattr(noise_ahead, "time", SimpleNamespace(perf_counter=lambda: clock.now))
    model.generate(prompt.repeat(2, 1), max_new_tokens=24, do_sample=True, spec_method="auto")
    assert clock.now > 48.0, "a row for each token"
    assert recorded == pytest.approx([ONE] * len(recorded))
