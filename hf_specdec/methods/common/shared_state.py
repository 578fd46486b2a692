"""State that methods remember and several threads use at once."""

import copy
import threading
from typing import Any


class SharedState:
    """Base class: whoever reads or changes it holds `_lock`; copies and pickles are of one moment."""

    def __init__(self) -> None:
        self._lock = threading.Lock()

    def __getstate__(self) -> dict[str, Any]:
        with self._lock:
            return copy.deepcopy({name: value for name, value in vars(self).items() if name != "_lock"})

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._lock = threading.Lock()
