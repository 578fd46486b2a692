"""A server on a free port of this machine, with the embedded target, and the real `openai` client."""

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import openai
import pytest
import torch
import uvicorn

import hf_specdec
from hf_specdec.api.many_prompts.shared_batch import SharedBatch
from hf_specdec.tools.serve.app import build_app
from hf_specdec.tools.serve.requests import RequestReader, method_arguments

NAME = "embedded"
CHAT = "{% for m in messages %}# {{ m['role'] }}: {{ m['content'] }}\n{% endfor %}# assistant:"
END = 0  # ends a text of the embedded target
Client = Callable[..., openai.OpenAI]


class Script:
    """A logits processor that writes an answer by what the prompt holds, a token at a time.

    Args:
        answer: gives the text of an answer from its prompt.
        opening (`str`): ends every prompt, and is in no answer.
    """

    row_safe = True

    def __init__(self, tokenizer: Any, answer: Callable[[str], str], opening: str = "# assistant:") -> None:
        self.tokenizer, self.answer, self.opening = tokenizer, answer, opening

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        ids = input_ids[0].tolist()
        text = self.tokenizer.decode(ids)
        prompt = text[: text.rindex(self.opening) + len(self.opening)]
        num_new = len(ids) - len(self.tokenizer(prompt, add_special_tokens=False).input_ids)
        script = [*self.tokenizer(self.answer(prompt), add_special_tokens=False).input_ids, END]
        forced = torch.full_like(scores, -1e9)
        forced[0, script[num_new]] = 0.0
        return forced


@pytest.fixture(scope="session")
def target() -> Any:
    return hf_specdec.AutoModelForCausalLM.from_pretrained(hf_specdec.embedded.path("target"), precision="fp32")


@pytest.fixture(scope="session")
def chat_tokenizer() -> Any:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(hf_specdec.embedded.path("target"))
    tokenizer.chat_template = CHAT
    return tokenizer


@contextlib.contextmanager
def serving(model: Any, tokenizer: Any, *, api_keys: tuple[str, ...] = (), **options: Any) -> Iterator[str]:
    """The base URL of a running server with four places; `script` forces its answers."""
    seconds = options.pop("seconds", 30)
    shared: dict[str, Any] = {"max_batch_size": 4, "max_queue": options.pop("max_queue", None)}
    names = ("spec_method", "spec_config", "assistant_model", "assistant_tokenizer")
    method = {"spec_method": "prompt_lookup"} | {name: options.pop(name) for name in names if name in options}
    shared |= method_arguments(method, shares_texts=options.get("shares_texts", False))
    if (script := options.pop("script", None)) is not None:
        shared["logits_processor"] = [script]
    settings: dict[str, Any] = {"max_new_tokens": 16, **options}
    batch = SharedBatch(model, tokenizer=tokenizer, **shared)
    app = build_app(batch, RequestReader(model, tokenizer, NAME, **settings), api_keys=api_keys)
    config = uvicorn.Config(app, host="127.0.0.1", port=0, log_level="error", timeout_graceful_shutdown=seconds)
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run)
    thread.start()
    try:
        while not server.started:
            time.sleep(0.02)
        port = server.servers[0].sockets[0].getsockname()[1]
        yield f"http://127.0.0.1:{port}/v1"
    finally:
        server.should_exit = True
        thread.join()


@contextlib.contextmanager
def connected(model: Any, tokenizer: Any, *, key: str = "none", **options: Any) -> Iterator[openai.OpenAI]:
    """A client of a running server."""
    with (
        serving(model, tokenizer, **options) as url,
        openai.OpenAI(base_url=url, api_key=key, max_retries=0) as client,
    ):
        yield client


@pytest.fixture(scope="session")
def url(target: Any, chat_tokenizer: Any) -> Iterator[str]:
    with serving(target, chat_tokenizer) as address:
        yield address


@pytest.fixture
def client(url: str) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=url, api_key="none", max_retries=0) as client:
        yield client
