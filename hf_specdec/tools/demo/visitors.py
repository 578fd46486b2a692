"""Who races and who waits, so that a visitor can stop what is theirs. Knows sessions by their names alone."""

import contextlib
import threading
from collections.abc import Iterator

from hf_specdec.tools.demo.recorder import Stop


class Visitors:
    """The sessions of a page. Safe to share between threads.

    Args:
        seconds (`float`): longest race.
    """

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self._lock = threading.Lock()
        self._racing: dict[str, Stop] = {}
        self._waiting: set[str] = set()
        self._given_up: set[str] = set()

    def wait(self, session: str) -> None:
        """The session's race is about to join the queue."""
        with self._lock:
            self._waiting.add(session)
            self._given_up.discard(session)

    def stop(self, session: str) -> bool:
        """Stop the session's race, also one that waits; whether there was one."""
        with self._lock:
            if (stop := self._racing.get(session)) is not None:
                stop.stop()
            elif session in self._waiting:
                self._given_up.add(session)
            return stop is not None or session in self._given_up

    @property
    def num_waiting(self) -> int:
        """Sessions whose races have not begun."""
        return len(self._waiting)

    def stop_all(self) -> None:
        """Stop every race, also those that wait."""
        with self._lock:
            sessions = [*self._racing, *self._waiting]
        for session in sessions:
            self.stop(session)

    def leave(self, session: str) -> None:
        """The session is over."""
        self.stop(session)
        with self._lock:
            self._waiting.discard(session)
            if session not in self._racing:
                self._given_up.discard(session)

    @contextlib.contextmanager
    def racing(self, session: str) -> Iterator[Stop]:
        """The session's turn; the stop says at once that it is over where it was given up while it waited."""
        stop = Stop(self.seconds)
        with self._lock:
            self._waiting.discard(session)
            if session in self._given_up:
                self._given_up.discard(session)
                stop.stop()
            self._racing[session] = stop
        try:
            yield stop
        finally:
            stop.stop()
            with self._lock:
                if self._racing.get(session) is stop:
                    del self._racing[session]
