"""A visitor's browser: types, races, steps with the keyboard, stops, reads a message, on a phone and in the dark."""

import re
import shutil
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from hf_specdec.tools.demo.settings import GALLERY
from tests.demo.conftest import HOSTILE, PROMPT

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


def race(page: Any, prompt: str = PROMPT) -> None:
    """Type a prompt, race, and see all of it."""
    page.get_by_label("Prompt", exact=True).fill(prompt)
    button(page, "Race").click()
    page.locator(".hs-play").wait_for()
    button(page, "Show all").click()


def test_a_race_is_in_view_while_it_runs_and_is_replayed(visit: Open) -> None:
    page = visit("?prompt=import%20os%0A&methods=prompt_lookup,lookahead&max_new_tokens=32")
    red = page.locator("#stop.stop")
    assert red.count() == 0 and button(page, "Stop").is_disabled(), "there is nothing to stop"
    button(page, "Race").click()
    page.locator(".hs-running").wait_for()
    sync_api.expect(page.locator(".hs-lane").first).to_be_in_viewport()
    assert red.count() == 1
    page.locator(".hs-playing").wait_for()
    hidden = page.locator(".hs-text [data-t]:not(.hs-on)")
    assert hidden.count() > 0, "tokens come one after the other"
    page.locator(".hs-race:not(.hs-playing)").wait_for()
    assert hidden.count() == 0
    assert page.locator(".hs-lane").count() == 4
    assert page.locator(".hs-same").count() == 3
    assert re.fullmatch(r"\d+\.\d\d\u00d7", page.locator(".hs-ratio").first.inner_text())
    sync_api.expect(button(page, "Stop")).to_be_disabled()
    shown = page.locator(".hs-counters").last.locator("dd").nth(1).inner_text()
    assert page.locator("#table").get_by_text(f"{float(shown):g}", exact=True).count() > 0
    button(page, "Replay").click()
    page.locator(".hs-playing").wait_for()


def test_examples_fill_the_prompt(visit: Open) -> None:
    page = visit()
    for example in GALLERY:
        button(page, example["name"]).click()
        sync_api.expect(page.get_by_label("Prompt", exact=True)).to_have_value(example["prompt"])
        sync_api.expect(page.get_by_text(example["shows"])).to_be_visible()


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
    page.locator(".hs-play").wait_for()
    page.get_by_label("Prompt", exact=True).focus()
    tab_to(page, "Inside a step")
    page.keyboard.press("Enter")
    headline = page.locator(".hs-headline strong").first
    headline.wait_for()
    page.locator("#step-number input[type=range]").focus()
    page.keyboard.press("Home")
    sync_api.expect(headline).to_contain_text("Step 1 of")
    page.keyboard.press("ArrowRight")
    sync_api.expect(headline).to_contain_text("Step 2 of")
    assert page.locator(".hs-across .hs-chosen rect").count() == 1


def test_stop_stops(visit: Open) -> None:
    page = visit("?prompt=import%20os%0A&methods=lookahead&max_new_tokens=256&temperature=1.5")
    button(page, "Race").click()
    sync_api.expect(page.locator(".hs-verdict").first).to_contain_text(re.compile(r"^[1-9]\d* tokens? so far"))
    button(page, "Stop").click()
    sync_api.expect(page.locator("#status")).to_contain_text("Stopped; this is what was there by then.")
    assert page.locator(".hs-lane").last.locator("[data-t]").count() < 256


def test_mistakes_are_messages(visit: Open) -> None:
    page = visit("?prompt=x&methods=outo")
    alert = page.get_by_role("alert")
    sync_api.expect(alert).to_contain_text("Did you mean 'auto'?")
    page.get_by_label("Prompt", exact=True).fill("")
    button(page, "Race").click()
    sync_api.expect(alert).to_contain_text("\u201cPrompt\u201d must hold some text")
    assert "Traceback" not in page.content()


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
    """Nothing runs out of the page; trees go downwards and their labels stay readable."""
    page = visit(
        "?prompt=import%20os%0A&methods=auto&auto.num_nodes=32&max_new_tokens=24", width=390, color_scheme=scheme
    )
    button(page, "Race").click()
    page.locator(".hs-play").wait_for()
    for tab in ("Race", "Inside a step", "Figures"):
        page.get_by_role("tab", name=tab, exact=True).click()
        page.wait_for_timeout(300)
        assert page.evaluate("document.documentElement.scrollWidth") <= 390, tab
        for part in page.locator(".hs-lane:visible, .hs-votes:visible, .hs-tree:visible").all():
            box = part.bounding_box()
            assert box["x"] >= 0 and box["x"] + box["width"] <= 390, tab
    lightness = page.evaluate("getComputedStyle(document.body).backgroundColor.match(/\\d+/g).slice(0, 3).map(Number)")
    assert (sum(lightness) < 3 * 128) == (scheme == "dark")


def test_still_for_those_who_want_it(visit: Open) -> None:
    page = visit("?prompt=import%20os%0A&methods=auto&max_new_tokens=24", reduced_motion="reduce")
    button(page, "Race").click()
    page.locator(".hs-play").wait_for()
    assert page.locator(".hs-playing").count() == 0
