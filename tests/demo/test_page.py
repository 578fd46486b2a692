"""A page that is being served: races over its interface, two visitors at once, and nothing else to be had."""

import json
import re
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import httpx
import pytest

from hf_specdec.tools.demo.gallery import GALLERY
from hf_specdec.tools.demo.recorder import Stop
from hf_specdec.tools.demo.settings import KNOBS
from tests.demo.conftest import HOSTILE, LIMITS

gradio_client = pytest.importorskip("gradio_client", reason="the demo's page needs gradio")
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::ResourceWarning")
STATUS, LINK, LANES, LANE, NUMBER, STEP, CHARTS, DOWNLOAD = range(8)


def client(served: str, folder: Path) -> Any:
    return gradio_client.Client(served, verbose=False, download_files=str(folder))


def inputs(prompt: str, *methods: str, tokens: int = 16) -> list[Any]:
    """Everything the page hands over, greedy and forgetful."""
    return [prompt, list(methods or ("prompt_lookup",)), tokens, 0.0, 0, False, *[knob.default for knob in KNOBS]]


def test_a_race_over_the_interface(served: str, tmp_path: Path) -> None:
    visitor = client(served, tmp_path)
    shown = visitor.predict(*inputs(GALLERY[0].prompt, "auto", "lookahead"), api_name="/race")
    assert "Done." in shown[STATUS]
    assert shown[LANES].count("<section") == 3 and "Equal to plain: the same 16 tokens" in shown[LANES]
    assert "hs-tree" in shown[STEP] and "<svg" in shown[CHARTS]
    file = shown[DOWNLOAD]["value"] if isinstance(shown[DOWNLOAD], dict) else shown[DOWNLOAD]
    document = json.loads(Path(file).read_text())
    assert [lane["method"] for lane in document["lanes"]] == ["plain", "auto", "lookahead"]
    step = visitor.predict("Lookahead", 1, api_name="/step")
    assert "Step 1 of" in step and "hs-window" in step


def test_two_visitors_at_once_get_their_own(served: str, tmp_path: Path) -> None:
    visitors = [client(served, tmp_path) for _ in range(2)]
    prompts = [GALLERY[0].prompt, GALLERY[3].prompt]
    ready = threading.Barrier(2)

    def race(place: int) -> Any:
        ready.wait()
        return visitors[place].predict(*inputs(prompts[place], "auto"), api_name="/race")

    with ThreadPoolExecutor(2) as pool:
        results = list(pool.map(race, range(2)))
    for place, shown in enumerate(results):
        own, other = (prompts[place][-12:-1], prompts[1 - place][-12:-1])
        text = re.sub(r"<[^>]*>", "", shown[LANES].replace("&quot;", '"').replace("&#x27;", "'"))
        assert own in text and other not in text
        step = visitors[place].predict("Auto", 1, api_name="/step")
        assert "Step 1 of" in step or "Nothing was drafted" in step


@pytest.mark.wide
def test_a_visitor_without_a_race_sees_nobody_s_steps(served: str, tmp_path: Path) -> None:
    client(served, tmp_path).predict(*inputs(GALLERY[0].prompt), api_name="/race")
    with pytest.raises(gradio_client.exceptions.AppError, match="not in the list of choices"):
        client(served, tmp_path).predict("Prompt lookup", 1, api_name="/step")
    step = client(served, tmp_path).predict(None, 1, api_name="/step")
    assert "Step 1 of" not in str(step)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({0: ""}, "must hold some text"),
        ({0: "x = 1\n" * 300}, "must have 1 to 256 tokens"),
        ({1: []}, "must be 1 to 3 methods"),
        ({4: 2**40}, "`seed` must be"),
    ],
)
def test_a_mistake_is_a_message(served: str, tmp_path: Path, changes: dict[int, Any], said: str) -> None:
    asked = inputs(GALLERY[0].prompt)
    for place, value in changes.items():
        asked[place] = value
    shown = client(served, tmp_path).predict(*asked, api_name="/race")
    assert said in shown[STATUS] and "Traceback" not in shown[STATUS]


def test_hostile_prompts_come_back_as_text(served: str, tmp_path: Path) -> None:
    shown = client(served, tmp_path).predict(*inputs(HOSTILE, tokens=8), api_name="/race")
    for part in (shown[LANES], shown[STEP], shown[CHARTS], shown[LINK]):
        assert "<script" not in str(part) and "\x1b" not in str(part) and "\u202e" not in str(part)
    assert "&lt;script&gt;" in shown[LANES] and "\u241b[31m" in shown[LANES]


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("POST", "/gradio_api/upload", 404),
        ("GET", "/gradio_api/proxy=https://example.com/", 404),
        ("GET", "/monitoring", 404),
        ("GET", "/gradio_api/vibe-code", 404),
        ("GET", "/gradio_api/file=/etc/passwd", 403),
        ("GET", "/gradio_api/file=pyproject.toml", 403),
        ("GET", "/docs", 404),
    ],
)
def test_there_is_nothing_but_the_page(served: str, method: str, path: str, status: int) -> None:
    answer = httpx.request(method, served.rstrip("/") + path, files={"files": b"x"} if method == "POST" else None)
    assert answer.status_code == status


def test_requests_are_bounded(served: str) -> None:
    answer = httpx.post(served + "gradio_api/call/race", content=b"x" * 300_000)
    assert answer.status_code == 413
    answer = httpx.post(served + "gradio_api/call/race", content=iter([b"x"]))
    assert answer.status_code == 411


def test_the_page_listens_on_this_machine_and_allows_nothing_from_elsewhere(served: str) -> None:
    assert served.startswith(("http://127.0.0.1:", "http://localhost:"))
    answer = httpx.get(served)
    assert "default-src 'self'" in answer.headers["content-security-policy"]
    assert "fonts.googleapis" not in answer.text


def test_the_limits_are_the_page_s(served: str) -> None:
    components = httpx.get(served + "config").json()["components"]
    prompt = next(part for part in components if part["props"].get("elem_id") == "prompt")
    tokens = next(part for part in components if part["props"].get("elem_id") == "tokens")
    assert prompt["props"]["max_length"] == LIMITS.max_prompt_chars
    assert tokens["props"]["maximum"] == LIMITS.max_new_tokens


def stops(*sessions: str) -> tuple[Any, dict[str, Stop]]:
    """A page of which nothing is served, with a race of each session."""
    from hf_specdec.tools.demo.page import Page

    page: Any = Page.__new__(Page)
    page._stops, page.blocks, page._folder = {name: Stop() for name in sessions}, MagicMock(), MagicMock()
    return page, dict(page._stops)


def test_visitors_stop_only_their_own() -> None:
    page, known = stops("a", "b")
    page._stop(SimpleNamespace(session_hash="a"))
    assert known["a"].is_over and not known["b"].is_over


def test_every_race_is_stopped_when_the_page_closes() -> None:
    page, known = stops("a", "b")
    page.close()
    assert known["a"].is_over and known["b"].is_over
    page.blocks.close.assert_called_once_with(verbose=False)


def test_who_leaves_stops() -> None:
    page, known = stops("a")
    page._leave(SimpleNamespace(session_hash="a"))
    assert known["a"].is_over and not page._stops
