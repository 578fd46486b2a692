"""`hf-specdec serve`: what it hands to the server, and what it says."""

import sys
from typing import Any

import pytest

from tests.cli.conftest import Run


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What uvicorn would run."""
    import uvicorn

    found: dict[str, Any] = {}
    monkeypatch.setattr(uvicorn, "run", lambda app, **options: found.update(options, app=app))
    return found


def test_it_listens_on_this_machine_alone(run: Run, served: dict[str, Any]) -> None:
    result = run("serve", "--port", "8123")
    assert result.exit_code == 0, result.stderr
    assert (served["host"], served["port"]) == ("127.0.0.1", 8123)
    assert "http://127.0.0.1:8123/v1" in result.stderr
    assert "--api-key" not in result.stderr


@pytest.mark.parametrize(("words", "is_warned"), [((), True), (("--api-key", "secret"), False)])
def test_an_open_address_without_a_key_is_pointed_out(
    run: Run, served: dict[str, Any], words: tuple[str, ...], is_warned: bool
) -> None:
    result = run("serve", "--host", "0.0.0.0", *words)
    assert result.exit_code == 0, result.stderr
    assert ("asks for a key" in result.stderr) == is_warned


@pytest.mark.parametrize(
    ("words", "reserved"),
    [
        (("--lookahead-config=[7,5,7]",), "LookaheadConfig"),
        (("--spec-config", '{"num_nodes": 8}'), "AutoSpecConfig"),
        (("--spec-method", "lookahead"), "NoneType"),
    ],
)
def test_a_configuration_of_the_command_is_the_maximum_of_requests(
    run: Run, served: dict[str, Any], monkeypatch: pytest.MonkeyPatch, words: tuple[str, ...], reserved: str
) -> None:
    from hf_specdec.serve import app

    monkeypatch.setattr(app, "build_app", lambda engine, reader, api_keys: type(reader.reserved).__name__)
    assert run("serve", *words).exit_code == 0
    assert served["app"] == reserved


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (("--memory", "key"), "`--memory` must come with --api-key"),
        (("--memory", "keys", "--api-key", "k"), "Did you mean 'key'?"),
    ],
)
def test_a_memory_that_no_key_could_have_is_refused(run: Run, words: tuple[str, ...], told: str) -> None:
    result = run("serve", *words)
    assert result.exit_code == 2
    assert told in " ".join(result.stderr.split())


def test_without_the_extra_the_install_line_is_given(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "uvicorn", None)
    result = run("serve")
    assert result.exit_code == 2
    assert 'pip install "hf_specdec[serve]"' in result.stderr


def test_a_draft_method_needs_a_draft_for_a_model_of_one_s_own(run: Run) -> None:
    result = run("serve", "--model", "some/model", "--spec-method", "draft_model")
    assert result.exit_code == 2
    assert "--draft-model" in result.stderr
