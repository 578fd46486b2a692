"""A racer on the embedded pair, a recorded race, and a page that is being served."""

import asyncio
import gc
from collections.abc import Iterator
from typing import Any

import pytest

import hf_specdec
from hf_specdec import embedded
from hf_specdec.tools.demo.gallery import GALLERY
from hf_specdec.tools.demo.record import Race
from hf_specdec.tools.demo.recorder import Stop
from hf_specdec.tools.demo.runner import Racer
from hf_specdec.tools.demo.settings import Limits, Settings

LIMITS = Limits(max_new_tokens=256, max_prompt_tokens=256, max_prompt_chars=2000, max_seconds=60)
HOSTILE = "<script>document.title = 'taken'</script>\x1b[31m\x07\u202e&amp;"


def load(name: str) -> Any:
    return hf_specdec.AutoModelForCausalLM.from_pretrained(embedded.path(name), precision="fp32")


@pytest.fixture(scope="session")
def racer(tokenizer: Any) -> Racer:
    return Racer(load("target"), tokenizer, load("draft"), limits=LIMITS)


@pytest.fixture(scope="session")
def race(racer: Racer) -> Race:
    """A short race of three methods."""
    values = {"auto.num_nodes": 12}
    settings = Settings(
        prompt=GALLERY[0].prompt, methods=("auto", "lookahead", "draft_model"), values=values, max_new_tokens=40
    )
    return racer.start(settings, {}, Stop()).future.result()


@pytest.fixture(scope="module")
def served(racer: Racer) -> Iterator[str]:
    """The address of a page on this machine."""
    pytest.importorskip("gradio", reason="the demo's page needs gradio")
    from hf_specdec.tools.demo.page import Page
    from hf_specdec.tools.demo.serve import launch

    page = Page(racer)
    _, address, _ = launch(page, port=None, blocks_thread=False)
    yield address
    page.close()
    left_open = asyncio.get_event_loop_policy().get_event_loop()  # gradio makes it the thread's, and never closes it
    asyncio.set_event_loop(None)
    left_open.close()
    gc.collect()  # what servers and clients leave open is found where their warnings are expected
