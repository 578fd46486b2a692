"""Drawings: well-formed, complete, and harmless whatever the text is."""

import dataclasses
import re
from collections.abc import Callable
from html.parser import HTMLParser
from xml.etree import ElementTree

import pytest

from hf_specdec.common.observer import SourceVote
from hf_specdec.methods.registry import sources
from hf_specdec.tools.demo.draw.charts import draw_charts
from hf_specdec.tools.demo.draw.lanes import draw_race
from hf_specdec.tools.demo.draw.markup import escaped, one_line, percent
from hf_specdec.tools.demo.draw.notices import draw_error, draw_idea, draw_link, draw_notice
from hf_specdec.tools.demo.draw.sources import draw_legend, source_class, source_of
from hf_specdec.tools.demo.draw.steps import draw_step
from hf_specdec.tools.demo.draw.tree import draw_tree
from hf_specdec.tools.demo.record import Lane, Node, Race, Step, Token
from hf_specdec.tools.demo.settings import Settings
from tests.demo.conftest import HOSTILE

VOID = {"br", "input", "img", "hr", "meta", "link"}


class Reader(HTMLParser):
    """Collects tags, attributes and text, and sees that tags are closed in order."""

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

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data


def hostile_race() -> Race:
    """Every text of a record is markup, control characters, and characters that turn text around."""
    nodes = (
        Node(-1, HOSTILE),
        Node(0, HOSTILE, "text", 0.5, True, (SourceVote("text", 0.5, 1.0),)),
        Node(0, "\n", "window", None),
    )
    nodes = (dataclasses.replace(nodes[0], is_accepted=True), *nodes[1:])
    step = Step(nodes, (HOSTILE, HOSTILE), 9, 1, 0.1, 0.2, 0.1, ((HOSTILE,),), ((HOSTILE, ((HOSTILE,),)),))
    tokens = tuple(Token(HOSTILE, 0.1 * number, "text", number - 1) for number in range(3))
    lane = Lane("auto", HOSTILE, tokens, (1, 2, 3), (step,), num_equal=1, note=HOSTILE)
    return Race(HOSTILE, (Lane("plain", HOSTILE, tokens, (1, 2, 3)), lane), {"device": HOSTILE})


def everything(race: Race) -> dict[str, str]:
    steps = {
        f"step {place} of {lane.method}": draw_step(race, lane, place)
        for lane in race.lanes
        for place in range(max(1, len(lane.steps)))
    }
    return {"race": draw_race(race), "charts": draw_charts(race), **steps}


@pytest.mark.wide
def test_the_drawings_are_well_formed(race: Race) -> None:
    for name, html in everything(race).items():
        reader = Reader(html)
        assert reader.tags, name
        for svg in re.findall(r"<svg.*?</svg>", html, re.DOTALL):
            ElementTree.fromstring(svg)


def test_hostile_text_is_shown_and_does_nothing() -> None:
    """No tag, no attribute and no control character comes out of a visitor's or a model's text."""
    allowed = set(Reader("".join(everything(_with_text(hostile_race(), "x")).values())).tags)
    drawn = everything(hostile_race())
    drawn |= {
        "link": draw_link(Settings(prompt=HOSTILE + '" onclick="x')),
        "error": draw_error(HOSTILE),
        "notice": draw_notice(HOSTILE),
        "idea": draw_idea({"model": HOSTILE, "parameters": 1, "dtype": HOSTILE, "device": HOSTILE, "threads": 1}),
    }
    for name, html in drawn.items():
        reader = Reader(html)
        assert "script" not in reader.tags and set(reader.tags) <= allowed | {"a", "h1", "ol"}, name
        assert not [attribute for attribute in reader.attributes if attribute.startswith("on")], name
        assert not re.search(r"[\x00-\x08\x0b-\x1f\x7f\u202a-\u202e\u2066-\u2069]", html), name
    assert "<script>document.title" in Reader(drawn["race"]).text
    assert "\u241b[31m" in Reader(drawn["race"]).text


def _with_text(race: Race, text: str) -> Race:
    return eval(repr(race).replace(repr(HOSTILE), repr(text)))


def test_every_token_is_in_its_lane_with_its_time(race: Race) -> None:
    html = draw_race(race)
    for lane in race.lanes:
        section = html.split(f'data-method="{lane.method}"')[1].split("</section>")[0]
        times = [float(value) for value in re.findall(r'data-t="([\d.]+)"', section)]
        assert times == pytest.approx([token.seconds for token in lane.tokens], abs=1e-4)
        text = "".join(re.findall(r'data-s="\d+">(.*?)</span>', section, re.DOTALL))
        assert text == "".join(escaped(token.text) for token in lane.tokens)


def test_the_verdict_says_equal_or_where_not(race: Race) -> None:
    assert "Equal to plain: the same 40 tokens" in draw_race(race)
    other = dataclasses.replace(race.lanes[1], num_equal=7)
    html = draw_race(dataclasses.replace(race, lanes=(race.plain, other)))
    assert "Differs from plain from token 8 on" in html and "rounds differently" not in html
    html = draw_race(dataclasses.replace(race, lanes=(race.plain, other), is_exact=False))
    assert "rounds differently" in html


def test_a_stopped_race_has_no_ratio(race: Race) -> None:
    stopped = dataclasses.replace(race.lanes[1], is_stopped=True)
    html = draw_race(dataclasses.replace(race, lanes=(race.plain, stopped)))
    assert "\u00d7 plain" not in html and "Stopped. Equal to plain as far as both went" in html


@pytest.mark.parametrize("source", ["target", *sources(), "draft"])
def test_each_source_has_a_colour_and_a_cue_of_its_own(source: str) -> None:
    """The methods of heads share one, as a race has one head."""
    from hf_specdec.tools.demo.serve import ASSETS

    css = (ASSETS / "style.css").read_text(encoding="utf-8")
    rules = dict(re.findall(r"^\.hs-s-(\w+) \{ (.*?) \}", css, re.MULTILINE))
    assert source_of(source).label in draw_legend([source])
    cues = {name: re.sub(r"--c: .*", "", rule).strip() for name, rule in rules.items() if name != "draft"}
    assert source_class(source).removeprefix("hs-s-") in rules
    assert len(set(cues.values())) == len(cues)


def test_the_tree_shows_all_nodes_and_the_target_s_choice(race: Race) -> None:
    for lane in race.lanes[1:]:
        for step in lane.steps:
            svg = draw_tree(step)
            assert svg.count("<rect") == len(step.nodes) + 1
            assert svg.count("hs-edge") == len(step.nodes)
            assert svg.count('class="hs-node hs-accepted') == len(step.tokens) - 1
            assert svg.count('class="hs-node hs-chosen') == 1
            boxes = re.findall(r'<rect x="(\d+)" y="(\d+)"', svg)
            assert len(set(boxes)) == len(boxes), "no node lies on another"


def test_a_step_says_what_each_source_said(race: Race) -> None:
    auto = race.lanes[1]
    for number, step in enumerate(auto.steps):
        html = draw_step(race, auto, number)
        assert ("What each source said" in html) == (len(step.nodes) > 1)
        for source in {vote.source for node in step.nodes[:12] for vote in node.votes}:
            assert source_of(source).label in html


def test_lookahead_shows_window_and_pool(race: Race) -> None:
    lane = race.lanes[2]
    html = draw_step(race, lane, len(lane.steps) - 1)
    assert html.count("<th>level ") == 4 and "The pool" in html
    assert html.split("hs-window")[1].split("</table>")[0].count("<td>") == 28


@pytest.mark.parametrize("draw", [draw_race, draw_charts])
def test_a_race_without_drafts_is_drawn_too(race: Race, draw: Callable[[Race], str]) -> None:
    alone = dataclasses.replace(race, lanes=(race.plain,))
    assert Reader(draw(alone)).tags
    assert "drafts nothing" in draw_step(alone, race.plain, 0)


def test_the_charts_say_their_figures(race: Race) -> None:
    html = draw_charts(race)
    assert html.count("<svg") == 3 * 3
    lane = race.lanes[1]
    drafted, accepted = lane.accepted_by_position()[0]
    assert f"position 1: {accepted} of {drafted} steps" in html


def test_labels_are_one_line_and_short() -> None:
    assert one_line("a\tb \n") == "a\u21e5b\u00b7\u23ce"
    assert one_line("") == "\u2205"
    assert one_line("x" * 30) == "x" * 13 + "\u2026"
    assert (percent(0.5), percent(0.001), percent(1.0)) == ("50 %", "&lt;1 %", "100 %")
