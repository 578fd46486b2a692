"""A page that is being served: races over its interface, two visitors at once."""

import re
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import httpx
import pytest

from hf_specdec.tools.demo.record import Stop
from hf_specdec.tools.demo.settings import GALLERY, KNOBS
from tests.demo.conftest import LIMITS, PROMPT

gradio_client = pytest.importorskip("gradio_client", reason="the demo's page needs gradio")
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::ResourceWarning")
STATUS, LINK, LANES, TABLE, LANE, NUMBER, STEP = range(7)


def race(served: str, folder: Path, prompt: str, *methods: str, tokens: int = 16, seed: int = 0) -> Any:
    """What a greedy race shows."""
    visitor = gradio_client.Client(served, verbose=False, download_files=str(folder))
    knobs = [knob.default for knob in KNOBS]
    return visitor.predict(prompt, list(methods), tokens, 0.0, seed, *knobs, api_name="/race")


def test_two_visitors_at_once_get_their_races(served: str, tmp_path: Path) -> None:
    prompts = [GALLERY[0]["prompt"], GALLERY[3]["prompt"]]
    ready = threading.Barrier(2)

    def visit(place: int) -> Any:
        ready.wait()
        return race(served, tmp_path, prompts[place], "auto", "lookahead")

    with ThreadPoolExecutor(2) as pool:
        results = list(pool.map(visit, range(2)))
    for place, shown in enumerate(results):
        assert "Done." in shown[STATUS] and "methods=auto" in shown[LINK]
        assert shown[LANES].count("<section") == 4
        assert shown[LANES].count("Equal to plain: the same 16 tokens") == 3
        assert "hs-tree" in shown[STEP] and "speed" in str(shown[TABLE])
        text = re.sub(r"<[^>]*>", "", shown[LANES].replace("&quot;", '"').replace("&#x27;", "'"))
        assert prompts[place][-12:-1] in text and prompts[1 - place][-12:-1] not in text


@pytest.mark.parametrize(
    ("prompt", "methods", "seed", "said"),
    [
        ("", ["auto"], 0, "\u201cPrompt\u201d must hold some text"),
        ("x = 1\n" * 300, ["auto"], 0, "\u201cPrompt\u201d must have 1 to 256 tokens"),
        (PROMPT, [], 0, "\u201cMethods\u201d must be 1 to 3"),
        (PROMPT, ["auto"], 2**40, "\u201cSeed\u201d must be"),
    ],
)
def test_a_mistake_is_a_message(
    served: str, tmp_path: Path, prompt: str, methods: list[str], seed: int, said: str
) -> None:
    shown = race(served, tmp_path, prompt, *methods, seed=seed)
    assert said in shown[STATUS] and "Traceback" not in shown[STATUS]


def test_the_page_listens_on_this_machine_and_has_the_limits(served: str) -> None:
    assert served.startswith(("http://127.0.0.1:", "http://localhost:"))
    assert "fonts.googleapis" not in httpx.get(served).text
    components = httpx.get(served + "config").json()["components"]
    props = {part["props"].get("elem_id"): part["props"] for part in components}
    assert props["prompt"]["max_length"] == LIMITS.max_prompt_chars
    assert props["tokens"]["maximum"] == LIMITS.max_new_tokens


def stops(*sessions: str) -> tuple[Any, dict[str, Stop]]:
    """A page of which nothing is served, with a race of each session."""
    from hf_specdec.tools.demo.page import Page

    page: Any = Page.__new__(Page)
    page._stops, page.blocks = {name: Stop() for name in sessions}, MagicMock()
    return page, dict(page._stops)


@pytest.mark.parametrize("handler", ["_stop", "_leave"])
def test_visitors_stop_only_their_races(handler: str) -> None:
    page, events = stops("a", "b")
    getattr(page, handler)(SimpleNamespace(session_hash="a"))
    assert events["a"].is_set() and not events["b"].is_set()


def test_every_race_is_stopped_when_the_page_closes() -> None:
    page, events = stops("a", "b")
    page.close()
    assert events["a"].is_set() and events["b"].is_set()
    page.blocks.close.assert_called_once_with(verbose=False)
