"""Signs of life between ranks of several hosts: each counts in the store, and the leader sees who stopped."""

import threading
import time
from contextlib import suppress
from typing import Any

#: How often a rank counts, and after how long without one it counts as lost, in seconds.
_BEAT_S, LOST_S = 1.0, 60.0


def beat(store: Any, rank: int) -> None:
    """Counts, in a thread of its own, until the process ends or the store is gone. Nobody may wait in this client of
    the store meanwhile: one operation at a time has its connection."""

    def count() -> None:
        with suppress(Exception):  # the store is gone: so is the job
            while True:
                store.add(_key(rank), 1)
                time.sleep(_BEAT_S)

    threading.Thread(target=count, name="pulse", daemon=True).start()


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
