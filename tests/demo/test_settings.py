"""What a visitor asks for is checked, and fits into a link."""

from typing import Any
from urllib.parse import parse_qsl

import pytest

from hf_specdec.errors import ConfigError
from hf_specdec.methods.registry import resolve
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
        remembers=True,
    )
    assert Settings.from_query(dict(parse_qsl(settings.to_query())), Limits()) == settings


def test_a_link_leaves_defaults_out() -> None:
    assert Settings(prompt="x").to_query() == "prompt=x&methods=auto"


@pytest.mark.parametrize(("most", "usual"), [(256, 96), (64, 64)])
def test_a_link_without_a_length_asks_for_what_the_page_allows(most: int, usual: int) -> None:
    limits = Limits(max_new_tokens=most)
    settings = Settings.from_query({"prompt": "x"}, limits)
    settings.check_within(limits, METHOD_LABELS)
    assert settings.max_new_tokens == usual


def test_a_method_races_once() -> None:
    with pytest.raises(ConfigError, match="`methods` must name each method once"):
        Settings(prompt="x", methods=("auto", "auto"))


@pytest.mark.parametrize("method", METHOD_LABELS)
@pytest.mark.parametrize("end", ["least", "most", "default"])
def test_every_value_of_the_page_is_one_that_the_method_takes(method: str, end: str) -> None:
    settings = Settings(prompt="x", values={knob.name: getattr(knob, end) for knob in KNOBS})
    resolve(method.partition("+")[0]).config_class.parse(settings.config_of(method))


def test_the_page_begins_with_the_methods_own_defaults() -> None:
    for knob in KNOBS:
        config = resolve(knob.method).config_class()
        assert getattr(config, knob.field) == (knob.default or None)


def test_nothing_is_remembered_unless_a_visitor_wants_it() -> None:
    for method in ("auto", "prompt_lookup"):
        assert Settings(prompt="x").config_of(method)["pool"] == "request"
        assert Settings(prompt="x", remembers=True).config_of(method)["pool"] == "shared"


@pytest.mark.parametrize(
    ("field", "wrong"),
    [
        ("prompt", {"prompt": ""}),
        ("methods", {"methods": ()}),
        ("methods", {"methods": ("auto", "lookahead", "prompt_lookup", "draft_model")}),
        ("methods", {"methods": ("outo",)}),
        ("temperature", {"temperature": 2.5}),
        ("temperature", {"temperature": float("nan")}),
        ("temperature", {"temperature": 1e-300}),
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


@pytest.mark.parametrize(
    ("message", "settings"),
    [
        ("`prompt` must have at most 100 characters", Settings(prompt="x" * 101)),
        ("`max_new_tokens` must be", Settings(prompt="x", max_new_tokens=17)),
        ("--draft-model", Settings(prompt="x", max_new_tokens=8, methods=("draft_model",))),
        ("Choose Auto", Settings(prompt="x", max_new_tokens=8, methods=("lookahead",))),
    ],
)
def test_the_page_s_limits_hold(message: str, settings: Settings) -> None:
    with pytest.raises(ConfigError, match=message):
        settings.check_within(Limits(max_prompt_chars=100, max_new_tokens=16), {"auto": "Auto"})


@pytest.mark.parametrize("query", [{}, {"prompt": "x", "seed": "one"}, {"prompt": "x", "color": "red"}])
def test_a_wrong_link_is_a_user_s_mistake(query: dict[str, str]) -> None:
    with pytest.raises(ConfigError):
        Settings.from_query(query, Limits())
