"""Signs of life between ranks of several hosts: each counts in the store, and the leader sees who stopped."""

import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

#: How often a rank counts, and after how long without one it counts as lost, in seconds.
_BEAT_S, LOST_S = 1.0, 60.0


def beat(store: Any, rank: int, lost: Callable[[], None]) -> None:
    """Counts, in a thread of its own, until the process ends. Nobody may wait in this client of the store meanwhile:
    one operation at a time has its connection. Where the store is gone for LOST_S, rank 0's host is, which says nothing
    to those that wait for its next pass: the thread calls `lost`."""
    counted_s = time.monotonic()

    def count() -> None:
        nonlocal counted_s
        with suppress(Exception):  # the store is gone
            while True:
                store.add(_key(rank), 1)
                counted_s = time.monotonic()
                time.sleep(_BEAT_S)

    def watch() -> None:
        while time.monotonic() < counted_s + LOST_S:
            time.sleep(_BEAT_S)
        lost()

    for work in (count, watch):
        threading.Thread(target=work, name=f"pulse {work.__name__}", daemon=True).start()


class Pulses:
    """What the leader has seen of the other ranks' counts."""

    def __init__(self, store: Any) -> None:
        self._store = store
        self._seen: dict[int, tuple[int, float]] = {}  # the count, and when it was first seen

    def silent_s(self, rank: int) -> float:
        """For how long a rank has not counted, as far as this was asked before."""
        count, now = self._store.add(_key(rank), 0), time.monotonic()
        if rank not in self._seen or self._seen[rank][0] != count:
            self._seen[rank] = count, now
        return now - self._seen[rank][1]


def _key(rank: int) -> str:
    return f"pulse/{rank}"
