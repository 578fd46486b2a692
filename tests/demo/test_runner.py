"""Races: each lane is timed alone, equal to plain, recorded whole, and can be stopped; no lane knows another."""

import copy
import dataclasses
import threading
import time
from typing import Any

import pytest
import torch

import hf_specdec
from hf_specdec.engine.model_state import state_of
from hf_specdec.errors import ConfigError
from hf_specdec.methods.prompt_lookup.drafter import PromptLookupDrafter
from hf_specdec.tools.bench.loaded_model import LoadedModel
from hf_specdec.tools.bench.rows import PLAIN, TRANSFORMERS
from hf_specdec.tools.demo import figures
from hf_specdec.tools.demo.record import Race, Stop, Words
from hf_specdec.tools.demo.runner import Racer
from hf_specdec.tools.demo.settings import GALLERY, METHOD_LABELS, Settings
from tests.demo.conftest import CALM, LIMITS, PROMPT, run
from tests.helpers.zoo import FAMILIES, build


def test_every_lane_writes_what_plain_writes(race: Race, racer: Racer) -> None:
    inputs = racer.loaded.tokenizer(PROMPT, return_tensors="pt")
    model: Any = racer.loaded.model
    expected = model.generate(**{n: inputs[n] for n in ("input_ids", "attention_mask")}, max_new_tokens=40)
    new = tuple(expected[0, inputs["input_ids"].shape[1] :].tolist())
    assert [lane.label for lane in race.lanes] == [TRANSFORMERS, PLAIN, "Auto", "Lookahead", "Draft model"]
    for lane in race.lanes:
        assert lane.token_ids == new and race.num_equal(lane) == 40
        assert "".join(token.text for token in lane.tokens) == racer.loaded.tokenizer.decode(new)


def test_times_rise_and_tokens_of_a_step_come_together(race: Race) -> None:
    for lane in race.lanes:
        times = [token.seconds for token in lane.tokens]
        assert times == sorted(times) and times[0] > 0
        for number, step in enumerate(lane.steps, 1):
            tokens = [token for token in lane.tokens if token.step == number]
            assert len(tokens) == len(step.accepted) and tokens[-1].source == "target"
            assert lane.tokens.index(tokens[0]) == lane.num_before(number - 1)


def test_tokens_a_step_are_one_figure_in_lane_and_table(race: Race) -> None:
    """The table is that of `bench`."""
    table = race.table().set_index("lane")
    assert list(table.columns) == ["speed", "tokens/s", "tokens/step", "equal"]
    for lane in race.lanes:
        assert table["tokens/step"][lane.label] == pytest.approx(lane.tokens_per_step, abs=0.01)
        assert table["speed"][lane.label] == pytest.approx(race.ratio(lane), abs=0.01)
    assert (table["equal"] == 1.0).all()
    assert race.lanes[2].tokens_per_step == 39 / len(race.lanes[2].steps)


def test_figures_count_the_steps(race: Race) -> None:
    lane = race.lanes[2]
    drafted = [step for step in lane.steps if len(step.tree) > 1]
    shares = figures.acceptance([lane]).set_index("place")["accepted"]
    assert shares[1] == pytest.approx(sum(len(step.accepted) > 1 for step in drafted) / len(drafted))
    times = figures.times(race.lanes)
    assert set(times[times["lane"] == "Auto"]["part"]) == {"draft", "verify", "commit"}
    assert (times["ms"] > 0).all()


def test_sampled_lanes_repeat_with_their_seed(racer: Racer) -> None:
    races = [run(racer, temperature=temperature, seed=1, methods=("prompt_lookup",)) for temperature in (2, 2.0)]
    assert races[0].lanes[1].token_ids == races[1].lanes[1].token_ids
    assert races[0].lanes[2].token_ids == races[0].lanes[1].token_ids


def test_the_clock_leaves_out_what_observing_takes(racer: Racer, monkeypatch: pytest.MonkeyPatch) -> None:
    """A lane that is watched is as quick as another."""
    monkeypatch.setattr(PromptLookupDrafter, "describe", lambda *_: (time.sleep(0.05), ())[1])
    began = time.perf_counter()
    race = run(racer, methods=("prompt_lookup",))
    wall = time.perf_counter() - began
    num_steps = len(race.lanes[2].steps)
    assert wall > num_steps * 0.05
    assert sum(lane.seconds for lane in race.lanes) < wall - (num_steps - 1) * 0.05


def test_no_lane_and_no_race_drafts_from_another(racer: Racer) -> None:
    for _ in range(2):
        race = run(racer, methods=("auto", "prompt_lookup", "auto+draft_model"), values=CALM)
        nodes = [node for lane in race.lanes for step in lane.steps for node in step.nodes]
        assert nodes and "earlier_texts" not in {node.source for node in nodes}
    assert not state_of(racer.loaded.model).method_state.by_name


class StopsAt(Stop):
    """Is set when the race has so many tokens."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.calls = number

    def __call__(self, input_ids: torch.LongTensor, scores: torch.Tensor, **kwargs: Any) -> torch.BoolTensor:
        self.calls -= 1
        if not self.calls:
            self.set()
        return super().__call__(input_ids, scores, **kwargs)


@pytest.mark.parametrize(("number", "lanes"), [(5, 1), (24 + 5, 2)])
def test_a_stop_ends_the_text_at_the_next_token(racer: Racer, number: int, lanes: int) -> None:
    race = run(racer, StopsAt(number), methods=("prompt_lookup", "lookahead"))
    assert len(race.lanes) == lanes and race.is_cut
    assert len(race.lanes[-1].tokens) == 5
    assert race.lanes[-1].is_stopped and race.ratio(race.lanes[-1]) is None
    assert (race.table() is None) == (lanes == 1)


def test_too_long_a_prompt_is_refused_before_anything_runs(racer: Racer, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="`prompt` must have 1 to 256 tokens"):
        run(racer, prompt="x = 1\n" * 120)
    monkeypatch.setattr(racer.loaded.model.config, "max_position_embeddings", 40)
    with pytest.raises(ConfigError, match="`prompt` must have 1 to 16 tokens"):
        run(racer)


def test_races_run_one_at_a_time(racer: Racer) -> None:
    """Two visitors who start together get the lanes of one after the other, and each their own text."""
    threads, running = list[str](), list[int]()
    model: Any = racer.loaded.model
    generate = model.generate

    def watched(*args: Any, **kwargs: Any) -> Any:
        running.append(1)
        threads.append(threading.current_thread().name)
        assert sum(running) == 1
        try:
            return generate(*args, **kwargs)
        finally:
            running.pop()

    model.__dict__["generate"] = watched
    try:
        prompts = [GALLERY[0]["prompt"], GALLERY[3]["prompt"]]
        settings = [Settings(prompt=prompt, max_new_tokens=12, methods=("prompt_lookup",)) for prompt in prompts]
        races = [racer.start(each, Stop()) for each in settings]
        for race in races:
            race.future.result()
    finally:
        model.__dict__["generate"] = generate
    assert [race.prompt for race in races] == prompts and len(races[0].lanes) == len(races[1].lanes) == 3
    assert len(set(threads)) == 1 and len(threads) == 4


def test_every_method_of_the_page_runs(racer: Racer) -> None:
    racer.warm_up()
    assert racer.methods == list(METHOD_LABELS)
    head = run(racer, methods=("head",)).lanes[2]
    assert {node.source for step in head.steps for node in step.nodes} == {"eagle3"}
    assert racer._worker.submit(torch.get_num_threads).result() == torch.get_num_threads()


def test_what_a_model_cannot_do_does_not_race(racer: Racer) -> None:
    tokenizer, family = racer.loaded.tokenizer, FAMILIES["minimax"]
    model = build(dataclasses.replace(family, options={**family.options, "vocab_size": len(tokenizer)}))
    tight = dataclasses.replace(LIMITS, max_new_tokens=8, max_prompt_tokens=1)
    other = Racer(LoadedModel(hf_specdec.enable(model), tokenizer, "minimax"), tight)
    other.warm_up()
    assert other.methods == ["auto", "prompt_lookup"]
    with pytest.raises(ConfigError, match="`methods` must be among Auto, Prompt lookup on this page"):
        run(other, max_new_tokens=8, methods=("auto", "lookahead"))


def test_a_chat_model_s_prompts_go_through_its_template(racer: Racer) -> None:
    """The embedded model with a template: the race continues what the template makes of the message."""
    assert not racer.is_chat
    tokenizer = copy.deepcopy(racer.loaded.tokenizer)
    tokenizer.chat_template = "{% for m in messages %}# {{ m['role'] }}: {{ m['content'] }}\n{% endfor %}"
    chatting = Racer(dataclasses.replace(racer.loaded, tokenizer=tokenizer), LIMITS)
    assert chatting.is_chat
    lanes = run(chatting, prompt="sort a list", max_new_tokens=8).lanes
    expected = run(racer, prompt="# user: sort a list\n", max_new_tokens=8).lanes
    assert [lane.token_ids for lane in lanes] == [lane.token_ids for lane in expected]


@pytest.mark.parametrize(
    "text", ["def main():\n", "d\u00e9j\u00e0 vu \U0001f9ea\u200d\U0001f52c done", "\t\t\x00\x1b[0m"]
)
def test_the_pieces_are_the_text(racer: Racer, text: str) -> None:
    tokenizer = racer.loaded.tokenizer
    pieces = Words(tokenizer, tokenizer("import os\n")["input_ids"]).pieces(tokenizer(text)["input_ids"])
    assert "".join(pieces) == text


def test_a_character_of_several_tokens_belongs_to_the_last(racer: Racer) -> None:
    ids = racer.loaded.tokenizer("\U0001f9ea")["input_ids"]
    assert Words(racer.loaded.tokenizer, [5]).pieces(ids) == [""] * (len(ids) - 1) + ["\U0001f9ea"]
