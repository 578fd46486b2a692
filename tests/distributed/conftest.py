"""The commands' runner, for what they say in one process."""

from tests.cli.conftest import run

__all__ = ["run"]
