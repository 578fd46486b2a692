"""Starting processes of one tensor-parallel model.

done = launch("-m", "hf_specdec", "generate", "x = 1", "--tensor-parallel")
"""

import os
import subprocess
import sys
from pathlib import Path

__all__ = ["launch"]

ROOT = Path(__file__).parents[2]


def launch(*arguments: str, timeout: float = 570) -> "subprocess.CompletedProcess[str]":
    """Two processes under torchrun, in the repository's root."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", *arguments]
    return subprocess.run(
        command,
        capture_output=True,
        text=True,
        stdin=subprocess.DEVNULL,
        cwd=ROOT,
        env={**os.environ, "PYTHONFAULTHANDLER": "1"},
        timeout=timeout,
        check=False,
    )
