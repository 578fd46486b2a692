"""Two processes of a tensor-parallel model, forked where their modules are imported: quicker than torchrun.

python -m tests.distributed.forked tests.distributed.worker FOLDER
"""

import importlib
import os
import signal
import socket
import sys
import traceback
from pathlib import Path

__all__ = ["main"]

NUM_PROCESSES = 2


def main(module: str, folder: Path) -> int:
    """Run `module.main(folder)` as each rank; when one fails the others are ended. The exit status of the first to."""
    worker = importlib.import_module(module)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free.getsockname()[1])}
    os.environ |= {"WORLD_SIZE": str(NUM_PROCESSES), "LOCAL_WORLD_SIZE": str(NUM_PROCESSES)}
    running = {_fork(worker.main, rank, folder) for rank in range(NUM_PROCESSES)}
    failed = 0
    while running:
        process, status = os.wait()
        running.discard(process)
        failed = failed or os.waitstatus_to_exitcode(status)
        for other in running if failed else ():
            os.kill(other, signal.SIGKILL)
    return abs(failed)


def _fork(work: object, rank: int, folder: Path) -> int:
    process = os.fork()
    if process:
        return process
    status = 1
    try:
        os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank)}
        assert callable(work)
        work(folder)
        status = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(status)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], Path(sys.argv[2])))
