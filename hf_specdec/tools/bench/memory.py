"""Most memory in use during a call, where the machine can tell.

On CUDA it is what torch had allocated at most. On Linux without it, the peak of the process's resident set, weights and
libraries included: the kernel's high-water mark, reset before the call.
"""

from pathlib import Path

import torch

PROCESSES = Path("/proc")
RESET_HIGH_WATER_MARK = "5"


class PeakMemory:
    """Measures one call at a time.

    Args:
        pid: the process that makes it; this one by default.
    """

    def __init__(self, device: torch.device, pid: int | None = None) -> None:
        self.device = device
        self._process = PROCESSES / ("self" if pid is None else str(pid))
        self._can_reset = False

    def start(self) -> None:
        """Forget earlier peaks."""
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)
            return
        try:
            (self._process / "clear_refs").write_text(RESET_HIGH_WATER_MARK)
            self._can_reset = True
        except OSError:
            self._can_reset = False

    def stop(self) -> int | None:
        """Bytes at the peak since `start`; `None` where no one counts."""
        if self.device.type == "cuda":
            return torch.cuda.max_memory_allocated(self.device)
        if self.device.type != "cpu" or not self._can_reset:
            return None
        lines = (self._process / "status").read_text().splitlines()
        return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM:")), None)


def how_measured(device: torch.device) -> str:
    """One line for a table's header."""
    memory = PeakMemory(device)
    memory.start()
    if memory.stop() is None:
        return "not measured on this machine"
    if device.type == "cuda":
        return "torch.cuda.max_memory_allocated during a call"
    return "peak resident set of the process during a call (VmHWM), weights and libraries included"
