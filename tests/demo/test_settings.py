"""What a visitor chooses is checked, and fits into a link."""

from typing import Any
from urllib.parse import parse_qsl

import pytest

from hf_specdec.errors import ConfigError
from hf_specdec.methods.registry import resolve
from hf_specdec.tools.demo.draw.markup import draw_error
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
