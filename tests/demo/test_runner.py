"""Races: each lane is timed alone, equal to plain, recorded whole, and can be stopped; visitors share no memory."""

import copy
import dataclasses
import json
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch

import hf_specdec
from hf_specdec.common.observer import SpecStep
from hf_specdec.engine.model_state import state_of
from hf_specdec.errors import ConfigError
from hf_specdec.methods.prompt_lookup.drafter import PromptLookupDrafter
from hf_specdec.tools.demo.gallery import CHAT_GALLERY, GALLERY
from hf_specdec.tools.demo.record import Race
from hf_specdec.tools.demo.recorder import Recorder, Stop
from hf_specdec.tools.demo.runner import Memories, Racer
from hf_specdec.tools.demo.settings import METHOD_LABELS, Settings
from tests.demo.conftest import LIMITS, load
from tests.helpers.cover import wide_but
from tests.helpers.zoo import FAMILIES, build


def run(racer: Racer, memories: Memories | None = None, stop: Stop | None = None, **settings: Any) -> Race:
    given = {"prompt": GALLERY[0].prompt, "max_new_tokens": 24} | settings
    return racer.start(Settings(**given), {} if memories is None else memories, stop or Stop()).future.result()


def test_a_race_past_the_model_s_positions_is_refused(racer: Racer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(racer.model.config, "max_position_embeddings", 40)
    with pytest.raises(ConfigError, match="`prompt` must leave 24 of the model's 40 positions for new tokens"):
        run(racer)


def test_every_lane_writes_what_plain_writes(race: Race, racer: Racer) -> None:
    inputs = racer.tokenizer(GALLERY[0].prompt, return_tensors="pt")
    expected = racer.model.generate(**{n: inputs[n] for n in ("input_ids", "attention_mask")}, max_new_tokens=40)
    new = tuple(expected[0, inputs["input_ids"].shape[1] :].tolist())
    assert [lane.method for lane in race.lanes] == ["plain", "auto", "lookahead", "draft_model"]
    for lane in race.lanes:
        assert lane.token_ids == new
        assert "".join(token.text for token in lane.tokens) == racer.tokenizer.decode(new)
        assert lane.method == "plain" or lane.num_equal == 40


def test_times_rise_and_tokens_of_a_step_come_together(race: Race) -> None:
    for lane in race.lanes:
        times = [token.seconds for token in lane.tokens]
        assert times == sorted(times) and times[0] > 0
        assert [token.step for token in lane.tokens] == sorted(token.step for token in lane.tokens)
    for lane in race.lanes[1:]:
        for number, step in enumerate(lane.steps):
            own = [token for token in lane.tokens if token.step == number]
            assert tuple(token.text for token in own) != () and len(own) == len(step.tokens)
            assert own[-1].source == "target"
            assert [token.source for token in own[:-1]] == [node.source for node in step.nodes[1:] if node.is_accepted]
            assert own[-1].seconds - own[0].seconds <= step.commit_seconds + 1e-3


def test_the_counters_add_up(race: Race) -> None:
    for lane in race.lanes:
        assert lane.num_forwards == (len(lane.tokens) if lane.method == "plain" else len(lane.steps) + 1)
        assert lane.tokens_per_step == pytest.approx(40 / lane.num_forwards)
        assert lane.tokens_per_second == pytest.approx(40 / lane.tokens[-1].seconds)
    for lane in race.lanes[1:]:
        accepted = sum(count for _, count in lane.accepted_by_position())
        assert accepted == sum(node.is_accepted for step in lane.steps for node in step.nodes[1:]) > 0
        assert race.ratio(lane) == pytest.approx(lane.tokens_per_second / race.plain.tokens_per_second)


def test_the_record_is_json(race: Race) -> None:
    document = json.loads(json.dumps(race.to_dict()))
    assert [lane["method"] for lane in document["lanes"]] == [lane.method for lane in race.lanes]
    assert document["lanes"][2]["steps"][0]["window"]


def test_a_temperature_draws_plain_s_tokens_by_the_seed(racer: Racer) -> None:
    races = [run(racer, temperature=1.0, seed=seed, methods=("prompt_lookup",)) for seed in (1, 2)]
    assert all(race.lanes[1].token_ids == race.plain.token_ids for race in races)
    assert races[0].plain.token_ids != races[1].plain.token_ids


def test_a_whole_temperature_is_a_number_too(racer: Racer) -> None:
    """As browsers send 2.0."""
    races = [run(racer, temperature=temperature, seed=1, methods=("prompt_lookup",)) for temperature in (2, 2.0)]
    assert races[0].plain.token_ids == races[1].plain.token_ids


def test_the_clock_leaves_out_what_observing_takes(racer: Racer, monkeypatch: pytest.MonkeyPatch) -> None:
    """A lane that is watched is as quick as one that is not."""
    monkeypatch.setattr(PromptLookupDrafter, "describe", lambda *_: (time.sleep(0.05), ())[1])
    began = time.perf_counter()
    race = run(racer, methods=("prompt_lookup",))
    wall = time.perf_counter() - began
    lane = race.lanes[1]
    assert wall > len(lane.steps) * 0.05
    assert lane.seconds + race.plain.seconds < wall - (len(lane.steps) - 1) * 0.05


def test_a_head_races_as_a_draft_model_does(tokenizer: Any) -> None:
    head = hf_specdec.AutoDraftHead.from_pretrained(hf_specdec.embedded.path("head"), dtype=torch.float32)
    racer = Racer(load("target"), tokenizer, head, limits=LIMITS)
    assert racer.methods["auto+draft_model"] == "Auto + draft head"
    race = run(racer, methods=("draft_model", "auto+draft_model"), values={"auto.num_nodes": 12})
    for lane in race.lanes[1:]:
        assert lane.token_ids == race.plain.token_ids
        assert "head" in lane.label
    assert {node.source for step in race.lanes[1].steps for node in step.nodes[1:]} <= {"eagle3", "target"}


@pytest.fixture
def recorded(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Sources of everything that was drafted."""
    sources: list[str] = []
    observe = Recorder.observe

    def watch(self: Recorder, step: SpecStep) -> None:
        sources.extend(node.source for node in step.nodes)
        observe(self, step)

    monkeypatch.setattr(Recorder, "observe", watch)
    yield sources


@pytest.mark.parametrize("method", wide_but(["auto"], ["auto", "prompt_lookup"]))
def test_nobody_drafts_from_another_s_text(racer: Racer, recorded: list[str], method: str) -> None:
    """Neither from another visitor's, nor from an earlier race of one's own that was not to be remembered."""
    how: dict[str, Any] = {"methods": (method,), "values": {"auto.num_nodes": 12}}
    mine: Memories = {}
    run(racer, mine, remembers=True, **how)
    run(racer, {}, remembers=True, **how)
    run(racer, mine, **how)
    run(racer, {}, **how)
    assert recorded and "earlier_texts" not in recorded
    assert not state_of(racer.model).method_state.by_name
    run(racer, mine, remembers=True, **how)
    assert "earlier_texts" in recorded


def test_no_lane_drafts_from_another_lane(racer: Racer, recorded: list[str]) -> None:
    values = {"auto.num_nodes": 12}
    run(racer, {}, remembers=True, methods=("auto", "prompt_lookup", "auto+draft_model"), values=values)
    assert "earlier_texts" not in recorded


class StopsAt(Stop):
    """Is asked to stop when the lane has so many tokens."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.calls = self.number = number

    def __call__(self, input_ids: torch.LongTensor, scores: torch.Tensor, **kwargs: Any) -> torch.BoolTensor:
        self.calls -= 1
        if not self.calls:
            self.stop()
        return super().__call__(input_ids, scores, **kwargs)


@pytest.mark.parametrize(("number", "lanes"), [(5, 1), (24 + 5, 2)])
def test_a_stop_ends_the_text_at_the_next_token(racer: Racer, number: int, lanes: int) -> None:
    race = run(racer, stop=StopsAt(number), methods=("prompt_lookup", "lookahead"))
    assert len(race.lanes) == lanes
    assert len(race.lanes[-1].tokens) == 5
    assert race.lanes[-1].is_stopped and race.ratio(race.lanes[-1]) is None


def test_time_is_limited(racer: Racer) -> None:
    race = run(racer, stop=Stop().begin(0.0), max_new_tokens=200)
    assert len(race.lanes) == 1 and len(race.plain.tokens) == 1 and race.plain.is_stopped


def test_too_long_a_prompt_is_refused_before_anything_runs(racer: Racer) -> None:
    with pytest.raises(ConfigError, match="256 tokens"):
        run(racer, prompt="x = 1\n" * 120)


def test_races_run_one_at_a_time(racer: Racer) -> None:
    """Two visitors who start together get the lanes of one after the other, and each their own text."""
    seen: list[str] = []
    running: list[int] = []
    generate = racer.model.generate

    def watched(*args: Any, **kwargs: Any) -> Any:
        running.append(1)
        seen.append(threading.current_thread().name)
        assert sum(running) == 1
        try:
            return generate(*args, **kwargs)
        finally:
            running.pop()

    racer.model.__dict__["generate"] = watched
    try:
        prompts = [GALLERY[0].prompt, GALLERY[3].prompt]
        starts = [
            racer.start(Settings(prompt=prompt, max_new_tokens=12, methods=("prompt_lookup",)), {}, Stop())
            for prompt in prompts
        ]
        races = [start.future.result() for start in starts]
    finally:
        racer.model.__dict__["generate"] = generate
    assert [race.prompt for race in races] == prompts
    assert len(set(seen)) == 1 and len(seen) == 4


def test_every_method_of_the_page_runs(racer: Racer) -> None:
    racer.warm_up()
    assert racer.methods == METHOD_LABELS
    assert racer.facts["parameters"] > 1e6


def test_what_a_model_cannot_do_does_not_race(tokenizer: Any) -> None:
    family = FAMILIES["gpt_neo"]
    model = build(dataclasses.replace(family, options={**family.options, "vocab_size": len(tokenizer)}))
    racer = Racer(hf_specdec.enable(model), tokenizer, limits=LIMITS)
    racer.warm_up()
    assert racer.methods.keys() == {"auto", "prompt_lookup"}
    with pytest.raises(ConfigError, match="Choose Auto or Prompt lookup"):
        run(racer, methods=("auto", "lookahead"))
    assert len(run(racer, methods=("auto", "prompt_lookup")).lanes) == 3


def test_races_use_the_threads_that_were_set(racer: Racer) -> None:
    found = racer._worker.submit(torch.get_num_threads).result()
    assert found == torch.get_num_threads()


def test_a_chat_model_s_prompts_go_through_its_template(racer: Racer) -> None:
    """The embedded model with a template: the race continues what the template makes of the message."""
    assert not racer.is_chat
    tokenizer = copy.deepcopy(racer.tokenizer)
    tokenizer.chat_template = "{% for m in messages %}# {{ m['role'] }}: {{ m['content'] }}\n{% endfor %}"
    chatting = Racer(racer.model, tokenizer, limits=racer.limits)
    assert chatting.is_chat
    asked = Settings(prompt="sort a list", max_new_tokens=8)
    said = Settings(prompt="# user: sort a list\n", max_new_tokens=8)
    (plain, auto), (expected, _) = (
        one.start(settings, {}, Stop()).future.result().lanes for one, settings in ((chatting, asked), (racer, said))
    )
    assert plain.token_ids == auto.token_ids == expected.token_ids


def test_a_chat_model_has_a_gallery_of_messages() -> None:
    assert all(example.prompt and example.shows for example in CHAT_GALLERY)
    assert not {example.prompt for example in CHAT_GALLERY} & {example.prompt for example in GALLERY}
