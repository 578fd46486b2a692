"""`hf-specdec serve`: what it hands to the server, and what it says."""

import sys
from typing import Any

import pytest
import uvicorn

from hf_specdec.api.many_prompts.shared_batch import SharedBatch
from tests.cli.conftest import Run


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What uvicorn would run, and how; the reader of its requests."""
    from hf_specdec.tools.serve import app

    settings: dict[str, Any] = {}

    def build_app(batch: SharedBatch, reader: Any, *, api_keys: list[str]) -> str:
        settings.update({name: batch._options[name] for name in ("spec_method", "spec_config")})
        batch.close()
        settings.update(reader=reader, api_keys=api_keys)
        return "app"

    monkeypatch.setattr(app, "build_app", build_app)
    monkeypatch.setattr(uvicorn, "run", lambda app, **options: settings.update(options))
    return settings


def test_it_listens_on_this_machine_alone(run: Run, served: dict[str, Any]) -> None:
    result = run("serve", "--port", "8123", "--shutdown-timeout", "5", "--limit-concurrency", "9")
    assert result.exit_code == 0, result.stderr
    assert (served["host"], served["port"], served["api_keys"]) == ("127.0.0.1", 8123, [])
    assert (served["timeout_graceful_shutdown"], served["limit_concurrency"]) == (5, 9)
    assert "--api-key" not in result.stderr
    shown = "serving embedded at http://127.0.0.1:8123/v1; for example:\n  curl http://127.0.0.1:8123/v1/completions"
    assert shown in result.stderr


@pytest.mark.parametrize(("words", "is_warned"), [((), True), (("--api-key", "secret"), False)])
def test_an_open_address_without_a_key_is_pointed_out(
    run: Run, served: dict[str, Any], words: tuple[str, ...], is_warned: bool
) -> None:
    result = run("serve", "--host", "0.0.0.0", *words)
    assert result.exit_code == 0, result.stderr
    assert ("asks for a key" in result.stderr) == is_warned


@pytest.mark.parametrize("key", ["", "  "])
def test_a_key_that_every_request_would_carry_is_refused(run: Run, served: dict[str, Any], key: str) -> None:
    """As `--api-key "$KEY"` gives it where the variable is not set."""
    result = run("serve", "--api-key", key)
    assert result.exit_code == 2
    assert "`api_key` must hold a key" in " ".join(result.stderr.split())
    assert not served


def test_a_configuration_of_the_command_is_that_of_requests(run: Run, served: dict[str, Any]) -> None:
    assert run("serve", "--lookahead-config=[7,5,7]").exit_code == 0
    assert (served["spec_method"], served["spec_config"].window_size) == ("lookahead", 7)


@pytest.mark.parametrize("package", ["fastapi", "uvicorn", "openai", "prometheus_client"])
def test_without_the_extra_the_install_line_is_given(run: Run, monkeypatch: pytest.MonkeyPatch, package: str) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    result = run("serve")
    assert result.exit_code == 2
    assert 'pip install "hf_specdec[serve]"' in result.stderr
