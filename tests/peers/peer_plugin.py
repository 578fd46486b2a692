"""A pytest plugin that runs each test plainly and then with each method, and keeps the outcomes in a journal."""

import json
import random
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from _pytest.runner import runtestprotocol
from report import read_journal
from watch import PLAIN, Watch


def pytest_addoption(parser: pytest.Parser) -> None:
    """Options that the command sets."""
    group = parser.getgroup("peers")
    group.addoption("--peer-journal", type=Path, required=True, help="file of outcomes, one JSON object a line")
    group.addoption("--peer-method", action="append", default=[], help="a spec_method, once for each")
    group.addoption("--peer-seconds", type=int, default=120, help="time of one run of a test")


def pytest_configure(config: pytest.Config) -> None:
    """Register the runs; the options are known here."""
    config.pluginmanager.register(Runs(config))


class Runs:
    """Runs of each collected test. Those of the journal are not repeated; one that ends the process has crashed."""

    def __init__(self, config: pytest.Config) -> None:
        self.methods = [PLAIN, *config.getoption("--peer-method")]
        self.seconds = config.getoption("--peer-seconds")
        self.journal: Path = config.getoption("--peer-journal")
        self.known = read_journal(self.journal)
        self.watch = Watch(PLAIN)

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        """Leave out the tests that have an outcome for each method."""
        items[:] = [item for item in items if self._missing(item.nodeid)]

    def _missing(self, test: str) -> list[str]:
        plain = self.known.get((test, PLAIN))
        if plain is not None and not (plain["outcome"] == "passed" and plain["calls"]):
            return []
        return [method for method in self.methods if (test, method) not in self.known]

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item, nextitem: pytest.Item | None) -> bool:
        """Run the test with each method that has no outcome yet."""
        while missing := self._missing(item.nodeid):
            self.watch = Watch(missing[0])
            self._write(item, "crashed", [])
            reports = runtestprotocol(item, log=False, nextitem=nextitem)
            failures = [*self.watch.differences, *(one.longreprtext[-2000:] for one in reports if one.failed)]
            skipped = any(one.skipped for one in reports)
            self._write(item, "failed" if failures else "skipped" if skipped else "passed", failures)
        return True

    def _write(self, item: pytest.Item, outcome: str, failures: list[str]) -> None:
        test, method = item.nodeid, self.watch.method
        error = "\n".join(failures) if method != PLAIN else ""
        line = {"test": test, "method": method, "outcome": outcome, "error": error, "calls": self.watch.calls}
        self.known[test, method] = line
        with self.journal.open("a") as file:
            file.write(json.dumps(line) + "\n")

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_call(self) -> Iterator[None]:
        """Watch the calls of the test, which draws the same random numbers in each run."""
        common = sys.modules["tests.test_modeling_common"]  # it draws prompts from a generator of its own
        for seed in (random.seed, np.random.seed, torch.manual_seed, common.global_rng.seed):
            seed(0)
        signal.signal(signal.SIGALRM, _expired)
        signal.alarm(self.seconds)
        try:
            with self.watch.watching():
                yield
        finally:
            signal.alarm(0)


def _expired(*_: object) -> Any:
    raise TimeoutError("The test takes too long.")
