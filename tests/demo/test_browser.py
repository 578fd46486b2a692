"""A visitor's browser: types, races, steps with the keyboard, stops, reads a message, on a phone and in the dark."""

import asyncio
import dataclasses
import gc
import re
import shutil
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from typing import Any

import pytest

from hf_specdec.errors import ConfigError
from hf_specdec.tools.demo.gallery import GALLERY
from hf_specdec.tools.demo.runner import Racer, Running
from tests.demo.conftest import HOSTILE, LIMITS, load

sync_api = pytest.importorskip("playwright.sync_api", reason="the browser's tests need playwright")
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
pytestmark = [
    pytest.mark.browser,
    pytest.mark.skipif(CHROMIUM is None, reason="there is no Chromium here"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::ResourceWarning"),
]
FLAGS = (
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
)
PATIENCE = 90_000  # milliseconds
Open = Callable[..., Any]


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with sync_api.sync_playwright() as playwright:
        opened = playwright.chromium.launch(executable_path=CHROMIUM, args=list(FLAGS))
        yield opened
        opened.close()


@pytest.fixture
def visit(browser: Any, served: str) -> Iterator[Open]:
    """Open the page; what it asked for elsewhere and what went wrong in it is an error in the end."""
    contexts, wrong = [], list[str]()

    def opened(query: str = "", *, width: int = 1280, **options: Any) -> Any:
        context = browser.new_context(viewport={"width": width, "height": 900}, **options)
        contexts.append(context)
        page = context.new_page()
        page.set_default_timeout(PATIENCE)
        page.on("pageerror", lambda error: wrong.append(str(error)))
        page.on("dialog", lambda dialog: wrong.append(f"dialog {dialog.message}"))
        page.on("request", lambda request: wrong.append(request.url) if is_elsewhere(request.url) else None)
        page.goto(served + query)
        button(page, "Race").wait_for()
        if query:  # a link's settings arrive after the page
            sync_api.expect(page.locator("#status")).to_contain_text(re.compile("link's settings|Not possible"))
        return page

    def is_elsewhere(url: str) -> bool:
        return not url.startswith((served.rstrip("/"), "data:", "blob:"))

    yield opened
    for context in contexts:
        context.close()
    assert not wrong


def button(page: Any, name: str) -> Any:
    return page.get_by_role("button", name=name, exact=True)


def race(page: Any, prompt: str = GALLERY[0].prompt) -> None:
    """Type a prompt, race, and see all of it."""
    page.get_by_label("Prompt", exact=True).fill(prompt)
    button(page, "Race").click()
    page.locator(".hs-race").wait_for()
    button(page, "Show all").click()


def test_a_race_is_replayed_and_ends_with_a_verdict(visit: Open) -> None:
    page = visit("?prompt=import%20os%0A&methods=prompt_lookup,lookahead&max_new_tokens=32")
    button(page, "Race").click()
    page.locator(".hs-playing").wait_for()
    hidden = page.locator(".hs-text [data-t]:not(.hs-on)")
    assert hidden.count() > 0, "tokens come one after the other"
    page.locator(".hs-race:not(.hs-playing)").wait_for()
    assert hidden.count() == 0
    assert page.locator(".hs-lane").count() == 3
    assert page.locator(".hs-same").count() == 2
    assert re.fullmatch(r"\d+\.\d\d\u00d7 plain", page.locator(".hs-ratio").first.inner_text())
    button(page, "Replay").click()
    page.locator(".hs-playing").wait_for()


@pytest.mark.parametrize("place", range(len(GALLERY)))
def test_an_example_fills_the_prompt(visit: Open, place: int) -> None:
    page = visit()
    button(page, GALLERY[place].name).click()
    sync_api.expect(page.get_by_label("Prompt", exact=True)).to_have_value(GALLERY[place].prompt)
    sync_api.expect(page.get_by_text(GALLERY[place].shows)).to_be_visible()


def test_a_link_opens_the_page_with_its_settings(visit: Open) -> None:
    page = visit("?prompt=x%20%3D%201%0A&methods=lookahead&temperature=0.5&lookahead.window_size=5")
    sync_api.expect(page.get_by_label("Prompt", exact=True)).to_have_value("x = 1\n")
    assert page.get_by_label("Lookahead", exact=True).is_checked()
    assert not page.get_by_label("Auto", exact=True).is_checked()
    race(page, "y = 2\n")
    link = page.get_by_role("link", name="Link to these settings").get_attribute("href")
    assert "lookahead.window_size=5" in link and "prompt=y+%3D+2" in link and "temperature=0.5" in link


def tab_to(page: Any, name: str) -> None:
    """Press Tab until what is called so has the focus; whatever has it on the way can be seen to."""
    for _ in range(40):
        page.keyboard.press("Tab")
        focused = page.evaluate("document.activeElement.innerText || document.activeElement.outerHTML.slice(0, 80)")
        assert page.evaluate("getComputedStyle(document.activeElement).outlineStyle") != "none", focused
        if focused.strip() == name:
            return
    raise AssertionError(f"{name} is out of the keyboard's reach")


def test_the_keyboard_alone_gets_through(visit: Open) -> None:
    """From the prompt to the race, and step by step through the trees; the focus is always visible."""
    page = visit("?prompt=import%20os%0A&methods=lookahead&max_new_tokens=32")
    page.get_by_label("Prompt", exact=True).focus()
    tab_to(page, "Race")
    page.keyboard.press("Enter")
    page.locator(".hs-race").wait_for()
    tab_to(page, "Inside a step")
    page.keyboard.press("Enter")
    headline = page.locator(".hs-headline strong").first
    headline.wait_for()
    slider = page.locator("#step-number input[type=range]")
    slider.focus()
    page.keyboard.press("Home")
    sync_api.expect(headline).to_contain_text("Step 1 of")
    page.keyboard.press("ArrowRight")
    sync_api.expect(headline).to_contain_text("Step 2 of")
    page.locator("#step-panel .hs-scroll").first.focus()
    page.keyboard.press("ArrowRight")
    sync_api.expect(headline).to_contain_text("Step 3 of")
    page.keyboard.press("ArrowLeft")
    sync_api.expect(headline).to_contain_text("Step 2 of")
    assert page.locator(".hs-tree .hs-chosen rect").count() == 1


def test_stop_stops(visit: Open) -> None:
    page = visit("?prompt=import%20os%0A&methods=lookahead&max_new_tokens=256&temperature=1.5")
    button(page, "Race").click()
    sync_api.expect(page.locator("#status")).to_contain_text(re.compile(r": [1-9]\d* of 256 tokens"))
    began = time.perf_counter()
    button(page, "Stop").click()
    sync_api.expect(page.locator("#status")).to_contain_text("Stopped; this is what was there by then.")
    assert time.perf_counter() - began < 20
    assert page.locator(".hs-ratio").count() == 0
    last = page.locator(".hs-lane").last
    assert last.locator("[data-t]").count() < 256


def test_a_full_queue_is_a_message(browser: Any, tokenizer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """And the visitor can race later."""
    from hf_specdec.tools.demo.page import Page
    from hf_specdec.tools.demo.serve import launch

    racer = Racer(load("target"), tokenizer, limits=dataclasses.replace(LIMITS, queue_size=1))
    first: Future[Any] = Future()
    start, races = racer.start, list[Any]()

    def begin(*arguments: Any) -> Any:
        races.append(arguments)
        return Running(first) if len(races) == 1 else start(*arguments)

    monkeypatch.setattr(racer, "start", begin)
    page = Page(racer)
    _, address, _ = launch(page, port=None, blocks_thread=False)
    contexts = [browser.new_context() for _ in range(3)]
    try:
        visitors = []
        for place, context in enumerate(contexts):
            visitor = context.new_page()
            visitor.set_default_timeout(PATIENCE)
            visitor.goto(address)
            button(visitor, "Race").click()
            told = ("tokens. Each lane runs alone", "Waiting for the model", "the queue is full (1)")[place]
            sync_api.expect(visitor.locator("#status")).to_contain_text(told, timeout=PATIENCE)
            visitors.append(visitor)
        button(visitors[2], "Stop").click()
        first.set_exception(ConfigError("prompt", "must end", "x", "It did."))
        sync_api.expect(visitors[1].locator("#status")).to_contain_text("Done.", timeout=PATIENCE)
        assert "the queue is full" in visitors[2].locator("#status").inner_text(), "there is nothing to stop"
        button(visitors[2], "Race").click()
        sync_api.expect(visitors[2].locator("#status")).to_contain_text("Done.", timeout=PATIENCE)
    finally:
        for context in contexts:
            context.close()
        page.close()
        loop = asyncio.get_event_loop_policy().get_event_loop()  # as in the fixture of the other pages
        asyncio.set_event_loop(None)
        loop.close()
        gc.collect()


def test_a_mistake_is_a_message(visit: Open) -> None:
    page = visit()
    page.get_by_label("Prompt", exact=True).fill("")
    button(page, "Race").click()
    alert = page.get_by_role("alert")
    sync_api.expect(alert).to_contain_text("`prompt` must hold some text")
    assert "Traceback" not in page.content()


def test_a_wrong_link_is_a_message(visit: Open) -> None:
    page = visit("?prompt=x&methods=outo")
    sync_api.expect(page.get_by_role("alert")).to_contain_text("Did you mean 'auto'?")


def test_markup_and_escape_sequences_are_shown_not_run(visit: Open) -> None:
    page = visit()
    title = page.title()
    race(page, HOSTILE + "<img src=x onerror=\"document.title='taken'\">")
    assert "<script>document.title = 'taken'</script>" in page.locator(".hs-prompt").first.inner_text()
    assert page.locator(".hs img, .hs script").count() == 0
    page.get_by_role("tab", name="Inside a step").click()
    page.locator(".hs-headline").wait_for()
    assert page.title() == title


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_a_phone_s_width_is_enough(visit: Open, scheme: str) -> None:
    """Nothing runs out of the page; trees and tables scroll inside their own boxes."""
    page = visit(
        "?prompt=import%20os%0A&methods=auto&auto.num_nodes=32&max_new_tokens=24", width=390, color_scheme=scheme
    )
    button(page, "Race").click()
    page.locator(".hs-race").wait_for()
    for tab in ("Race", "Inside a step", "Charts"):
        page.get_by_role("tab", name=tab, exact=True).click()
        page.wait_for_timeout(300)
        assert page.evaluate("document.documentElement.scrollWidth") <= 390, tab
    lightness = page.evaluate("getComputedStyle(document.body).backgroundColor.match(/\\d+/g).slice(0, 3).map(Number)")
    assert (sum(lightness) < 3 * 128) == (scheme == "dark")


def test_still_for_those_who_want_it(visit: Open) -> None:
    page = visit("?prompt=import%20os%0A&methods=auto&max_new_tokens=24", reduced_motion="reduce")
    button(page, "Race").click()
    page.locator(".hs-race").wait_for()
    assert page.locator(".hs-playing").count() == 0


def test_the_page_is_there_soon(visit: Open) -> None:
    """The best of three visits, as this machine may be busy."""
    seconds = []
    for _ in range(3):
        page = visit()
        entry = "performance.getEntriesByType('navigation')[0].domContentLoadedEventEnd / 1000"
        seconds.append(page.evaluate(entry))
    assert min(seconds) < 2.0


def test_the_run_can_be_downloaded(visit: Open, tmp_path: Any) -> None:
    page = visit("?prompt=import%20os%0A&methods=auto&max_new_tokens=16")
    button(page, "Race").click()
    page.locator(".hs-race").wait_for()
    page.get_by_role("tab", name="Charts").click()
    with page.expect_download() as download:
        page.locator("#download").click()
    assert download.value.path().read_text().startswith('{"prompt": "import os\\n"')
