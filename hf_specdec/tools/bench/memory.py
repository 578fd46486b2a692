"""Most memory in use during a call, where the machine can tell.

On CUDA it is what torch had allocated at most. On Linux without it, the peak of the process's resident set, weights and
libraries included: the kernel's high-water mark, reset before the call.
"""

from pathlib import Path

import torch

PROCESS = Path("/proc/self")
RESET_HIGH_WATER_MARK = "5"


class PeakMemory:
    """Measures one call at a time."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._can_reset = False

    def start(self) -> None:
        """Forget earlier peaks."""
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)
            return
        try:
            (PROCESS / "clear_refs").write_text(RESET_HIGH_WATER_MARK)
            self._can_reset = True
        except OSError:
            self._can_reset = False

    def stop(self) -> int | None:
        """Bytes at the peak since `start`; `None` where no one counts."""
        if self.device.type == "cuda":
            return torch.cuda.max_memory_allocated(self.device)
        return _high_water_mark() if self.device.type == "cpu" and self._can_reset else None


def how_measured(device: torch.device) -> str:
    """One line for a table's header."""
    memory = PeakMemory(device)
    memory.start()
    if memory.stop() is None:
        return "not measured on this machine"
    if device.type == "cuda":
        return "torch.cuda.max_memory_allocated during a call"
    return "peak resident set of the process during a call (VmHWM), weights and libraries included"


def _high_water_mark() -> int | None:
    for line in (PROCESS / "status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    return None
