"""Starts a server of any kind by a command, waits until it answers, and stops it with all that it has started."""

import os
import re
import shlex
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from engines.common.tied_process import start_tied, stop_tied
from harness.api import HarnessError, UnsupportedError
from harness.common.server_containers import named_container

#: Seconds that a server gets to end by itself.
_GRACE_S = 10.0
_PLACEHOLDER = re.compile(r"\{(\w+)\}")


@dataclass(frozen=True)
class Launch:
    """How a server is started. `command`: its words, with placeholders such as {port}; with `image` those after the
    image's entry point. `gpu`: whether a container sees the devices."""

    command: str | Sequence[str]
    image: str = ""
    gpu: bool = False

    def words(self, values: Mapping[str, Callable[[], object]]) -> list[str]:
        """The words, with placeholders filled in. Raises HarnessError for an unknown placeholder and open quotes."""
        try:
            words = shlex.split(self.command) if isinstance(self.command, str) else list(self.command)
        except ValueError as exc:
            raise HarnessError(f"options.command: {exc}; close it") from None

        def fill(match: re.Match[str]) -> str:
            if match[1] not in values:
                known = ", ".join(f"{{{name}}}" for name in values)
                raise HarnessError(f"options.command: unknown placeholder {match[0]}; known: {known}")
            return str(values[match[1]]())

        return [_PLACEHOLDER.sub(fill, word) for word in words]


class ServerProcess:
    """A server that this process has started, in a process group of its own, charged to the same limits; a container
    is not. `files`: what a container sees of this host, by the path inside. Raises UnsupportedError where the program
    is not there."""

    def __init__(self, launch: Launch, words: Sequence[str], files: Mapping[str, Path], log: Path) -> None:
        self._log = log
        self._container = named_container(log.parent) if launch.image else ""
        if launch.image:
            gpus = ["--gpus", _devices()] if launch.gpu else []
            mounts = [word for inside, source in files.items() for word in ("--mount", _bind(inside, source))]
            # an image that is not there would be downloaded within the time that the server gets to start
            words = ["docker", "run", "--rm", "--name", self._container, "--pull", "never", "--network", "host",
                     "--ipc", "host", *gpus, *mounts, launch.image, *words]  # fmt: skip
        if not words or not (program := shutil.which(words[0])):
            raise UnsupportedError(f"options.command: there is no program {(words or [''])[0]!r}; install it, or give "
                                   "its path")  # fmt: skip
        last = [program, "rm", "--force", self._container] if self._container else []
        self._process = start_tied([program, *words[1:]], log, last)

    def require_alive(self, soon_s: float = 0.0) -> None:
        """Raises HarnessError with the log's last line where the server has ended, or does so within `soon_s`."""
        with suppress(subprocess.TimeoutExpired):
            code = self._process.wait(soon_s)
            raise HarnessError(f"the server ended with {code}: {self.last_line()}")

    def wait(self, healthy: Callable[[], bool], timeout_s: float) -> None:
        """Returns once it is healthy. Raises HarnessError where it ends, or does not answer in time."""
        until = time.monotonic() + timeout_s
        while not healthy():
            self.require_alive()
            if time.monotonic() > until:
                raise HarnessError(f"the server is not ready after {timeout_s:g} s (options.start_timeout): "
                                   f"{self.last_line()}")  # fmt: skip
            time.sleep(0.1)

    def last_line(self) -> str:
        """The last line that it printed."""
        with self._log.open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - 4096))
            lines = file.read().decode(errors="replace").strip().splitlines()
        return lines[-1].strip()[:300] if lines else "it printed nothing"

    def output(self) -> str:
        """The end of what it printed, for the launch's log."""
        return self._log.read_text(errors="replace")[-20_000:]

    def close(self) -> None:
        """Ends the server, its children and its container."""
        if self._container:
            subprocess.run(["docker", "stop", "--time", f"{_GRACE_S:.0f}", self._container], capture_output=True,
                           check=False)  # fmt: skip
        stop_tied(self._process, _GRACE_S)


def _bind(inside: str, source: Path) -> str:
    """A mount as Docker's client takes it: a line of CSV, as paths may hold commas and colons."""
    fields = ("type=bind", f"source={source}", f"target={inside}", "readonly")
    return ",".join('"' + field.replace('"', '""') + '"' for field in fields)


def _devices() -> str:
    """Those that a child process would see."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    return f'"device={visible}"' if visible else "all"


def free_port() -> int:
    """A port of the loopback interface that nothing listens on now."""
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        return int(unused.getsockname()[1])


#: What every command may name, beside what depends on the model.
PLACES: Mapping[str, Callable[[], object]] = {"python": lambda: sys.executable, "prefix": lambda: sys.prefix}
