"""What a visitor chooses is checked, and fits into a link."""

import runpy
import socket
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from urllib.parse import parse_qsl

import pytest
from typer.testing import CliRunner

from hf_specdec.errors import ConfigError
from hf_specdec.methods.registry import resolve
from hf_specdec.tools.cli import app
from hf_specdec.tools.demo.draw.markup import draw_error
from hf_specdec.tools.demo.runner import Racer
from hf_specdec.tools.demo.settings import KNOBS, METHOD_LABELS, Limits, Settings


def test_a_link_carries_the_settings() -> None:
    values = {knob.name: knob.most for knob in KNOBS}
    settings = Settings(
        prompt="a b&c=d\n\u00e9<",
        methods=("auto", "lookahead"),
        values=values,
        temperature=0.7,
        seed=5,
        max_new_tokens=33,
    )
    assert Settings.from_query(dict(parse_qsl(settings.to_query())), Limits()) == settings


def test_a_link_leaves_defaults_out() -> None:
    assert Settings(prompt="x").to_query() == "prompt=x&methods=auto"


@pytest.mark.parametrize(("most", "usual"), [(256, 96), (64, 64)])
def test_a_link_without_a_length_has_what_the_page_allows(most: int, usual: int) -> None:
    limits = Limits(max_new_tokens=most)
    settings = Settings.from_query({"prompt": "x"}, limits)
    settings.check_within(limits, METHOD_LABELS)
    assert settings.max_new_tokens == usual


@pytest.mark.parametrize("end", ["least", "most", "default"])
def test_every_value_of_the_page_is_one_that_the_method_takes(end: str) -> None:
    settings = Settings(prompt="x", values={knob.name: getattr(knob, end) for knob in KNOBS})
    for method in METHOD_LABELS:
        if method != "head":
            resolve(method.partition("+")[0]).config_class.parse(settings.config_of(method))


def test_the_page_begins_with_the_methods_defaults_and_no_shared_memory() -> None:
    for knob in KNOBS:
        config = resolve(knob.method).config_class()
        assert getattr(config, knob.field) == (knob.default or None)
    for method in ("auto", "prompt_lookup"):
        assert Settings(prompt="x").config_of(method)["pool"] == "request"


@pytest.mark.parametrize(
    ("field", "wrong"),
    [
        ("prompt", {"prompt": ""}),
        ("methods", {"methods": ()}),
        ("methods", {"methods": ("auto", "auto")}),
        ("methods", {"methods": ("auto", "lookahead", "prompt_lookup", "draft_model")}),
        ("methods", {"methods": ("outo",)}),
        ("temperature", {"temperature": 2.5}),
        ("temperature", {"temperature": float("nan")}),
        ("seed", {"seed": -1}),
        ("max_new_tokens", {"max_new_tokens": 0}),
        ("lookahead.window_size", {"values": {"lookahead.window_size": 99}}),
        ("parameter", {"values": {"lookahead.windowsize": 3}}),
    ],
)
def test_what_is_out_of_range_is_named(field: str, wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigError) as caught:
        Settings(**({"prompt": "x"} | wrong))
    assert caught.value.field == field


def test_errors_show_the_labels_of_the_page() -> None:
    with pytest.raises(ConfigError) as caught:
        Settings(prompt="x", values={"lookahead.window_size": 99})
    shown = draw_error(caught.value)
    assert "\u201cLookahead: Window W\u201d must be" in shown and "window_size" not in shown


@pytest.mark.parametrize(
    ("message", "settings"),
    [
        ("`prompt` must have at most 100 characters", Settings(prompt="x" * 101)),
        ("`max_new_tokens` must be", Settings(prompt="x", max_new_tokens=17)),
        ("'Draft model'. Drafts need the option --assistant-model", Settings(prompt="x", methods=("draft_model",))),
    ],
)
def test_the_page_s_limits_hold(message: str, settings: Settings) -> None:
    with pytest.raises(ConfigError, match=message):
        settings.check_within(Limits(max_prompt_chars=100, max_new_tokens=16 if "tokens" in message else 256), ["auto"])


@pytest.mark.parametrize("query", [{}, {"prompt": "x", "seed": "one"}, {"prompt": "x", "color": "red"}])
def test_a_wrong_link_is_a_user_s_mistake(query: dict[str, str]) -> None:
    with pytest.raises(ConfigError):
        Settings.from_query(query, Limits())


ROOT = Path(__file__).parents[2]


def test_without_gradio_the_install_line_is_the_hint(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.startswith("hf_specdec.tools.demo.")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "gradio", None)
    done = CliRunner().invoke(app, ["demo"])
    assert done.exit_code == 2
    assert 'pip install "hf_specdec[demo]"' in done.stderr


@pytest.mark.parametrize("command", ["demo", "serve"])
def test_a_port_that_another_program_has_is_refused_before_the_model_is_loaded(command: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = str(other.getsockname()[1])
        done = CliRunner().invoke(app, [command, "--port", port, "--model", "nowhere/at-all"])
    assert done.exit_code == 2
    assert f"`port` must be free on 127.0.0.1, but is {port}." in done.stderr


@pytest.mark.parametrize("raises", [False, True])
def test_the_page_is_closed_at_the_end(monkeypatch: pytest.MonkeyPatch, raises: bool) -> None:
    """Gradio returns at Ctrl-C; a race that goes on keeps the process alive, up to `--max-seconds`."""
    page = pytest.importorskip("hf_specdec.tools.demo.page", reason="the demo's page needs gradio")
    closed: list[bool] = []

    def launch(**_: Any) -> None:
        assert not closed
        if raises:
            raise KeyboardInterrupt

    monkeypatch.setattr(page, "Page", lambda _: SimpleNamespace(close=lambda: closed.append(True), launch=launch))
    monkeypatch.setattr(Racer, "warm_up", lambda _: None)
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = str(free.getsockname()[1])
    CliRunner().invoke(app, ["demo", "--model", "embedded", "--port", port])
    assert closed == [True]


@pytest.mark.wide
def test_the_folder_of_a_space_runs_the_command() -> None:
    done = subprocess.run(
        [sys.executable, str(ROOT / "demos" / "app.py"), "--help"], capture_output=True, text=True, cwd=ROOT, check=True
    )
    assert "--share" in done.stdout
    assert (ROOT / "demos" / "requirements.txt").read_text() == "hf_specdec[demo,gguf,models]\n"
    assert "sdk: gradio" in (ROOT / "demos" / "README.md").read_text()
    assert runpy.run_path(str(ROOT / "demos" / "app.py"))["app"] is app
