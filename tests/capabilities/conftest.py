"""A model of which nothing is known, and the probes that are run on it."""

from typing import Any

import pytest

import hf_specdec
from hf_specdec.forward.capabilities import findings
from tests.helpers.zoo import FAMILIES, build


@pytest.fixture
def fresh() -> Any:
    return hf_specdec.enable(build(FAMILIES["llama"]))


@pytest.fixture
def probes(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The probes that were run."""
    run: list[str] = []
    for name in ("probe", "probe_rows"):
        probe = getattr(findings, name)
        monkeypatch.setattr(findings, name, lambda *args, name=name, probe=probe: run.append(name) or probe(*args))
    return run
