"""Drawings: well-formed, complete, and harmless whatever the text is."""

import dataclasses
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

import hf_specdec.tools.demo
from hf_specdec.errors import ConfigError
from hf_specdec.methods.registry import sources
from hf_specdec.tools.bench.rows import PLAIN, TRANSFORMERS
from hf_specdec.tools.demo.draw.lanes import draw_race, draw_running
from hf_specdec.tools.demo.draw.markup import (
    draw_error,
    draw_legend,
    draw_link,
    draw_notice,
    escaped,
    one_line,
    source_class,
    source_of,
)
from hf_specdec.tools.demo.draw.steps import draw_step
from hf_specdec.tools.demo.draw.tree import draw_tree
from hf_specdec.tools.demo.record import Lane, Race
from hf_specdec.tools.demo.settings import Settings
from tests.demo.conftest import HOSTILE

VOID = {"br", "input", "img", "hr", "meta", "link"}


class Reader(HTMLParser):
    """Collects tags, attributes and text, and checks that tags are closed in order."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.attributes: list[str] = []
        self.text = ""
        self._open: list[str] = []
        self.feed(html)
        self.close()
        assert not self._open

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += [name for name, _ in attrs]
        if tag not in VOID:
            self._open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data


class HostileWords:
    """Spells every token as markup, control characters, and characters that turn text around."""

    def __init__(self, text: str) -> None:
        self.text = text

    def word(self, token: int) -> str:
        return self.text

    def decode(self, ids: Any) -> str:
        return self.text


def with_text(race: Race, text: str) -> Race:
    """The race with one text everywhere."""
    lanes = [
        dataclasses.replace(lane, tokens=tuple(dataclasses.replace(token, text=text) for token in lane.tokens))
        for lane in race.lanes
    ]
    return dataclasses.replace(race, prompt=text, lanes=lanes, words=HostileWords(text))  # type: ignore[arg-type]


def everything(race: Race) -> dict[str, str]:
    steps = {
        f"step {place} of {lane.label}": draw_step(race, lane, place)
        for lane in race.lanes
        for place in range(max(1, len(lane.steps)))
    }
    running = dataclasses.replace(race, lanes=race.lanes[:2])
    return {"race": draw_race(race), "running": draw_running(running), **steps}


def test_the_drawings_are_well_formed(race: Race) -> None:
    for name, html in everything(race).items():
        assert Reader(html).tags, name
        for svg in re.findall(r"<svg.*?</svg>", html, re.DOTALL):
            ElementTree.fromstring(svg)


def test_hostile_text_is_shown_and_does_nothing(race: Race) -> None:
    """No tag, no attribute and no control character comes out of a visitor's or a model's text."""
    allowed = set(Reader("".join(everything(with_text(race, "x")).values())).tags)
    drawn = everything(with_text(race, HOSTILE))
    drawn |= {
        "link": draw_link(Settings(prompt=HOSTILE + '" onclick="x')),
        "error": draw_error(ConfigError("prompt", HOSTILE, HOSTILE, HOSTILE)),
        "notice": draw_notice(HOSTILE),
    }
    for name, html in drawn.items():
        reader = Reader(html)
        assert "script" not in reader.tags and set(reader.tags) <= allowed | {"a", "strong"}, name
        assert not [attribute for attribute in reader.attributes if attribute.startswith("on")], name
        assert not re.search(r"[\x00-\x08\x0b-\x1f\x7f\u202a-\u202e\u2066-\u2069]", html), name
    assert "<script>document.title" in Reader(drawn["race"]).text
    assert "\ufffd[31m" in Reader(drawn["race"]).text


def section(race: Race, lane: Lane) -> str:
    return draw_race(race).split(f'aria-label="{lane.label}"')[1].split("</section>")[0]


def test_every_token_is_in_its_lane_with_its_time(race: Race) -> None:
    for lane in race.lanes:
        html = section(race, lane)
        times = [float(value) for value in re.findall(r'data-t="([\d.]+)"', html)]
        assert times == pytest.approx([token.seconds for token in lane.tokens], abs=1e-4)
        text = "".join(re.findall(r'data-s="\d+">(.*?)</span>', html, re.DOTALL))
        assert text == "".join(escaped(token.text) for token in lane.tokens)


def test_the_verdict_says_equal_or_where_not(race: Race) -> None:
    assert "Equal to plain: the same 40 tokens" in section(race, race.lanes[2])
    ids = race.lanes[2].token_ids
    other = dataclasses.replace(race.lanes[2], token_ids=(*ids[:7], -1, *ids[8:]))
    changed = dataclasses.replace(race, lanes=[*race.lanes[:2], other])
    assert "Differs from plain from token 8 on" in section(changed, other)
    baseline = dataclasses.replace(other, label=TRANSFORMERS)
    changed = dataclasses.replace(race, lanes=[baseline, *race.lanes[1:]])
    assert "round differently: other words from token 8 on" in section(changed, baseline)


def test_a_stopped_lane_has_no_ratio(race: Race) -> None:
    stopped = dataclasses.replace(race.lanes[2], is_stopped=True)
    html = section(dataclasses.replace(race, lanes=[*race.lanes[:2], stopped]), stopped)
    assert "hs-ratio" not in html and "Stopped." in html and "Equal to plain as far as both went" in html


def test_lanes_that_run_show_their_text_so_far(race: Race) -> None:
    running = dataclasses.replace(race, lanes=race.lanes[:2])  # its recorder is that of the last lane
    html = draw_running(running)
    assert html.count("<section") == 5 and html.count("Waits for its turn.") == 2
    assert "40 tokens so far." in html and escaped(race.words.decode(race.lanes[4].token_ids)) in html


def test_question_and_answer_of_a_chat_are_apart(race: Race) -> None:
    assert "hs-question" not in draw_race(race)
    chat = dataclasses.replace(race, is_chat=True)
    assert draw_race(chat).count('<span class="hs-question">') == len(race.lanes)


@pytest.mark.parametrize("source", ["target", *sources(), "draft"])
def test_each_source_has_a_colour_and_a_cue(source: str) -> None:
    """The methods of heads share one, as a race has one head."""
    css = (Path(hf_specdec.tools.demo.__file__).parent / "assets" / "style.css").read_text(encoding="utf-8")
    rules = dict(re.findall(r"^\.hs-s-(\w+) \{ (.*?) \}", css, re.MULTILINE))
    assert source_of(source).label in draw_legend([source])
    cues = {name: re.sub(r"--c: .*", "", rule).strip() for name, rule in rules.items() if name != "draft"}
    assert source_class(source).removeprefix("hs-s-") in rules
    assert len(set(cues.values())) == len(cues)


def test_both_trees_show_all_nodes_and_the_target_s_choice(race: Race) -> None:
    for step in [step for lane in race.lanes for step in lane.steps]:
        drawings = draw_tree(step, race.words).split("hs-down")
        assert len(drawings) == 2
        for svg in drawings:
            assert svg.count("<rect") == len(step.tree) + 1
            assert svg.count("hs-edge") == len(step.tree)
            assert svg.count('class="hs-node hs-accepted') == len(step.accepted) - 1
            assert svg.count('class="hs-node hs-chosen') == 1
            boxes = re.findall(r'<rect x="(\d+)" y="(\d+)"', svg)
            assert len(set(boxes)) == len(boxes), "no node lies on another"


def test_a_step_says_what_each_source_said(race: Race) -> None:
    auto = race.lanes[2]
    for number, step in enumerate(auto.steps):
        html = draw_step(race, auto, number)
        assert ("What each source said" in html) == (len(step.tree) > 1)
        for source in {vote.source for node in step.nodes[:12] for vote in node.votes}:
            assert source_of(source).label in html


def test_a_lane_without_drafts_is_drawn_too(race: Race) -> None:
    plain = race.lane(PLAIN)
    assert plain is not None and "drafts nothing" in draw_step(race, plain, 0)


def test_labels_are_one_line_and_short() -> None:
    assert one_line("a\tb \n") == "a\u21e5b\u00b7\u23ce"
    assert one_line("") == "\u2205"
    assert one_line("x" * 30) == "x" * 13 + "\u2026"
