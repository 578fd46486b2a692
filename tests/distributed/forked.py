"""Two processes of one model, forked where their modules are imported: quicker than torchrun.

A process that has computed gradients must not be forked so: torch's autograd refuses to work in its children.

python -m tests.distributed.forked tests.distributed.training_worker FOLDER
"""

import importlib
import os
import signal
import socket
import sys
import time
import traceback
from pathlib import Path

__all__ = ["main"]
NUM_PROCESSES, MOST_SECONDS = 2, 570.0


def main(module: str, folder: Path) -> int:
    """Run `module.main(folder)` as each rank; when one fails the others are ended. The exit status of the first to."""
    worker = importlib.import_module(module)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    running = {_fork(worker.main, rank, port, folder) for rank in range(NUM_PROCESSES)}
    failed, end = 0, time.monotonic() + MOST_SECONDS
    while running:
        time.sleep(0.01)
        for process in tuple(running):
            ended, status = os.waitpid(process, os.WNOHANG)
            if ended:
                running.discard(process)
                failed = failed or os.waitstatus_to_exitcode(status)
        for other in running if failed or time.monotonic() > end else ():
            os.kill(other, signal.SIGKILL)
    return abs(failed)


def _fork(work: object, rank: int, port: str, folder: Path) -> int:
    process = os.fork()
    if process:
        return process
    status = 1
    try:
        os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "RANK": str(rank), "LOCAL_RANK": str(rank)}
        os.environ |= {"WORLD_SIZE": str(NUM_PROCESSES), "LOCAL_WORLD_SIZE": str(NUM_PROCESSES)}
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
