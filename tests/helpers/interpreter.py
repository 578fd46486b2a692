"""Triton's interpreter, which only a process that imports Triton with it has: kernels run there on the CPU."""

import importlib.util
import os
import subprocess
import sys

import pytest

__all__ = ["interpreted", "pass_in_another_process"]

if importlib.util.find_spec("triton") is None:
    pytest.skip("Triton is not installed", allow_module_level=True)
IS_INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
interpreted = pytest.mark.skipif(not IS_INTERPRETED, reason="Triton is imported without its interpreter here")


def pass_in_another_process(file: str) -> None:
    """Run the tests of a file in a process with the interpreter; that process skips the test that calls this."""
    if IS_INTERPRETED:
        pytest.skip("This process is the other one")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", file]
    environment = os.environ | {"TRITON_INTERPRET": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout
