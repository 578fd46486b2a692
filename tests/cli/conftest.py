"""A runner for the commands."""

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from hf_specdec import embedded
from hf_specdec.tools.cli import app

Run = Callable[..., Result]
LOADING = ("generate", "chat", "info", "serve", "summarize", "train")  # commands that load smollm2 by default
TEMPLATE = (
    "{% for m in messages %}# {{ m['role'] }}: {{ m['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}# assistant: {% endif %}"
)


@pytest.fixture
def run() -> Run:
    """Call `hf-specdec` with the words given, on the embedded target where they name none; `stdin` is piped in."""

    def call(*words: str, stdin: str = "") -> Result:
        named = () if words[:1] not in [(name,) for name in LOADING] or "--model" in words else ("--model", "embedded")
        return CliRunner().invoke(app, [*words, *named], input=stdin)

    return call


@pytest.fixture(scope="session")
def chat_model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The embedded target with a chat template."""
    folder = shutil.copytree(embedded.path("target"), tmp_path_factory.mktemp("models") / "chat-model")
    (Path(folder) / "chat_template.jinja").write_text(TEMPLATE)
    return str(folder)
