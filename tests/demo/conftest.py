"""A racer on the embedded pair, a recorded race, and a page that is being served."""

import asyncio
import gc
from collections.abc import Iterator
from typing import Any

import pytest

from hf_specdec.tools.bench.loaded_model import LoadedModel, load_model
from hf_specdec.tools.demo.record import Race, Stop
from hf_specdec.tools.demo.runner import Racer
from hf_specdec.tools.demo.settings import GALLERY, Limits, Settings

LIMITS = Limits(max_new_tokens=256, max_prompt_tokens=256, max_prompt_chars=2000, max_seconds=60)
HOSTILE = "<script>document.title = 'taken'</script>\x1b[31m\x07\u202e&amp;"
PROMPT = GALLERY[0]["prompt"]
CALM = {"auto.num_nodes": 12}  # drafts that do not depend on how busy the machine is


def run(racer: Racer, stop: Stop | None = None, **settings: Any) -> Race:
    """A race to its end."""
    fields = {"prompt": PROMPT, "max_new_tokens": 24} | settings
    race = racer.start(Settings(**fields), stop or Stop())
    race.future.result()
    return race


@pytest.fixture(scope="session")
def loaded() -> LoadedModel:
    return load_model(device="cpu")


@pytest.fixture(scope="session")
def racer(loaded: LoadedModel) -> Racer:
    return Racer(loaded, LIMITS)


@pytest.fixture(scope="session")
def race(racer: Racer) -> Race:
    """A short race of three methods."""
    return run(racer, methods=("auto", "lookahead", "draft_model"), values=CALM, max_new_tokens=40)


@pytest.fixture(scope="module")
def served(racer: Racer) -> Iterator[str]:
    """The address of a page on this machine."""
    pytest.importorskip("gradio", reason="the demo's page needs gradio")
    from hf_specdec.tools.demo.page import Page

    page = Page(racer)
    _, address, _ = page.launch(prevent_thread_lock=True, quiet=True)
    yield address
    page.close()
    left_open = asyncio.get_event_loop_policy().get_event_loop()  # gradio makes it the thread's, and never closes it
    asyncio.set_event_loop(None)
    left_open.close()
    gc.collect()  # what servers and clients leave open is found where their warnings are expected
