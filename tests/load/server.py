"""A `harness serve` process under load: its address, its counts, and how much memory it holds."""

import http.client
import json
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from harness.serve.settings import ServeSettings

_SERVED = re.compile(r"is served at http://127\.0\.0\.1:(\d+)/v1")
_OUTCOME = re.compile(rb'harness_requests_total\{outcome="(\w+)"\} (\S+)')
#: Seconds between looks at a server's memory.
_LOOK_S = 0.05


@dataclass
class Server:
    """A server that runs. `said`: the lines of its stderr."""

    process: subprocess.Popen[str]
    port: int
    said: list[str]
    peak_bytes: int = 0
    _over: threading.Event = field(default_factory=threading.Event)

    def get(self, path: str) -> Any:
        """What it answers to a GET: JSON, or bytes."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        connection.request("GET", path)
        response = connection.getresponse()
        content = response.read()
        connection.close()
        assert response.status == 200, f"{path}: {response.status} {content[:200]!r}"
        return json.loads(content) if content.startswith(b"{") else content

    def outcomes(self) -> dict[str, int]:
        """How many requests ended how, by the server's own count."""
        return {name.decode(): int(float(count)) for name, count in _OUTCOME.findall(self.get("/metrics"))}

    def held_bytes(self) -> int:
        """Memory of its own that it holds now; pages of files can be given back, and do not count."""
        return anonymous_bytes(self.process.pid)

    def watch(self) -> None:
        """Keeps `peak_bytes` up to date until the server is stopped."""
        while not self._over.wait(_LOOK_S):
            self.peak_bytes = max(self.peak_bytes, anonymous_bytes(self.process.pid))

    def stop(self) -> int:
        """Ends it as SIGTERM does; its exit code."""
        self._over.set()
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(60)


def anonymous_bytes(pid: int | str) -> int:
    """Anonymous and shared memory of a process; 0 for one that has ended."""
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return 0
    found = re.findall(r"^Rss(?:Anon|Shmem):\s+(\d+) kB", status, re.MULTILINE)
    return 1024 * sum(map(int, found))


@contextmanager
def serving(settings: ServeSettings, *options: object) -> Iterator[Server]:
    """A server as `settings` say, on a free port, with more `options` of the command line. Killed in the end."""
    overrides = (word for override in settings.overrides for word in ("--set", override))
    memory = () if settings.memory is None else ("--memory", settings.memory)
    command = [
        sys.executable, "-m", "harness", "serve", "--model", settings.model, "--engine", settings.engine, *memory,
        "--port", "0", *overrides, *map(str, options),
    ]  # fmt: skip
    variables = os.environ | {"HARNESS_CACHE": str(settings.cache)}
    pipes: dict[str, Any] = {"stdout": subprocess.DEVNULL, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, env=variables, **pipes) as process:
        try:
            said: list[str] = []
            assert process.stderr is not None
            for line in process.stderr:
                said.append(line)
                if found := _SERVED.search(line):
                    break
            else:
                raise AssertionError("".join(said))
            server = Server(process, int(found[1]), said)
            threads = [
                threading.Thread(target=lambda: said.extend(process.stderr or ()), daemon=True),
                threading.Thread(target=server.watch, daemon=True),
            ]
            for thread in threads:
                thread.start()
            yield server
            server._over.set()
        finally:
            process.kill()
