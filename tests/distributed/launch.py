"""Starting processes of one tensor-parallel model.

done = launch("my_script.py")
"""

import os
import subprocess
import sys
from pathlib import Path

__all__ = ["launch", "launch_forked"]
ROOT = Path(__file__).parents[2]


def launch(*arguments: str, timeout: float = 570) -> "subprocess.CompletedProcess[str]":
    """Two processes under torchrun, in the repository's root."""
    return _run("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", *arguments, timeout=timeout)


def launch_forked(module: str, folder: str, timeout: float = 570) -> "subprocess.CompletedProcess[str]":
    """Two processes forked of one that has imported `module`, whose `main(folder)` each runs: quicker than torchrun."""
    return _run("-m", "tests.distributed.forked", module, folder, timeout=timeout)


def _run(*arguments: str, timeout: float) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [sys.executable, *arguments],
        capture_output=True,
        text=True,
        stdin=subprocess.DEVNULL,
        cwd=ROOT,
        env={**os.environ, "PYTHONFAULTHANDLER": "1"},
        timeout=timeout,
        check=False,
    )
