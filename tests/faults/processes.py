"""The processes of a command under test: found by a variable of their environment, and ended or stopped."""

import os
import signal
import time
import uuid
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

_VARIABLE = "FAULTS_MARKER"


@dataclass(frozen=True)
class Marker:
    """A value that all processes of a command have in their environment, however they were started."""

    value: str = field(default_factory=lambda: uuid.uuid4().hex)

    @property
    def environment(self) -> dict[str, str]:
        return {_VARIABLE: self.value}

    def living(self) -> list[int]:
        """Ids of the processes that have it; one that waits to be reaped has no environment any more."""
        wanted = f"{_VARIABLE}={self.value}".encode()
        return [pid for pid, environment in _environments() if wanted in environment]

    def workers(self) -> list[int]:
        """Those that run a worker or a helper."""
        return [pid for pid in self.living() if b"harness.run.worker" in _read(pid, "cmdline")]

    def named(self) -> dict[int, str]:
        """Those that live, with their command lines, for messages."""
        return {pid: _read(pid, "cmdline").replace(b"\0", b" ").decode(errors="replace")[:200] for pid in self.living()}

    def require_gone(self, seconds: float) -> None:
        """Waits until none lives; raises AssertionError with those that still do."""
        deadline = time.monotonic() + seconds
        while left := self.named():
            assert time.monotonic() < deadline, f"alive {seconds:g} s after the kill: {left}"
            time.sleep(0.02)


def send(pid: int, number: signal.Signals) -> bool:
    """Sends a signal; whether there was still a process to get it."""
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        return False
    return True


def _environments() -> Iterator[tuple[int, bytes]]:
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            yield int(entry.name), _read(int(entry.name), "environ")


def _read(pid: int, name: str) -> bytes:
    try:
        return Path(f"/proc/{pid}/{name}").read_bytes()
    except OSError:  # it has just ended, or is another user's
        return b""
