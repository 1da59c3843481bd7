"""Runs `harness` in a process of its own that need not import it again: forked from one that has.

The process has its own arguments, environment, folder and streams, and ends as any interpreter does. What Python or a
library does with a variable, a signal or a stream when it starts is another matter: tests of that start a new one.
"""

import importlib
import json
import os
import pkgutil
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from harness import cli

_ROOT = Path(__file__).parents[1]
_STREAMS = ("stdin", "stdout", "stderr")
#: What commands import, beside what these do; only time is lost where one is missing.
_IMPORTED = (
    *(f"harness.cli.{module.name}" for module in pkgutil.iter_modules(cli.__path__)),
    "harness.run.measure", "harness.run.options", "harness.planning.plan", "harness.batch.stream",
    "engines.adapters.fake", "engines.models.describe", "engines.planning.simulated",
    "reports.build", "reports.compare", "reports.terminal", "scipy.optimize",
)  # fmt: skip
_ENGINE = ("engines.offload.engine", "transformers.modeling_utils")


def _pythons(environment: Mapping[str, str]) -> dict[str, str]:
    """The variables that Python reads when it starts."""
    return {name: value for name, value in environment.items() if name.startswith("PYTHON")}


_PYTHONS = _pythons(os.environ)


class Forks:
    """A server of forks, started at the first request; one at a time."""

    def __init__(self) -> None:
        self._server: subprocess.Popen[bytes] | None = None

    @staticmethod
    def fits(environment: Mapping[str, str]) -> bool:
        """Whether Python, started with these variables, would be as the server is."""
        return _pythons(environment) == _PYTHONS

    def run(self, arguments: Sequence[str], environment: Mapping[str, str], folder: Path, files: Sequence[int]) -> int:
        """The exit code of `harness` with these arguments, and with three files as its streams."""
        request = {"arguments": list(arguments), "environment": dict(environment), "folder": str(folder)}
        server = self._started()
        try:
            socket.send_fds(self._channel, [json.dumps(request).encode()], files)
            if not (answer := self._channel.recv(64)):
                raise RuntimeError("the process that forks `harness` has ended")
            return int(answer)
        except BaseException:  # also of pytest's timeout: the next request finds another server
            self._server = None
            os.killpg(server.pid, 9)
            server.wait()
            raise

    def close(self) -> None:
        """Ends the server."""
        if self._server is not None:
            self._channel.close()
            self._server.wait()
            self._server = None

    def _started(self) -> subprocess.Popen[bytes]:
        if self._server is None:
            self._channel, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            with theirs:
                paths = os.pathsep.join(filter(None, [str(_ROOT), os.environ.get("PYTHONPATH")]))
                self._server = subprocess.Popen(
                    [sys.executable, "-P", "-m", "tests.forked", str(theirs.fileno())],
                    pass_fds=[theirs.fileno()],
                    env=os.environ | {"PYTHONPATH": paths},
                    start_new_session=True,  # Ctrl-C is pytest's
                )
        return self._server


def _wait_for_a_request(channel: socket.socket) -> dict[str, Any]:
    """Forks for each request; returns it in the fork. Ends with whoever started this process."""
    while True:
        message, files, _, _ = socket.recv_fds(channel, 1 << 20, len(_STREAMS))
        if not message:
            sys.exit()
        request = json.loads(message)
        _import_for(request["arguments"])
        if (pid := os.fork()) == 0:
            channel.close()
            for number, file in enumerate(files):
                os.dup2(file, number)
                os.close(file)
            return request
        for file in files:
            os.close(file)
        with suppress(BrokenPipeError):
            channel.send(str(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])).encode())


def _import_for(arguments: Sequence[str]) -> None:
    """What the command will import, once."""
    for module in (*_IMPORTED, *(_ENGINE if arguments[0] == "generate" and "fake" not in arguments else ())):
        importlib.import_module(module)


def main() -> None:
    request = _wait_for_a_request(socket.socket(fileno=int(sys.argv[1])))
    os.chdir(request["folder"])
    os.environ.clear()
    os.environ.update(request["environment"])
    sys.argv[:] = ["harness", *request["arguments"]]
    from harness.__main__ import main as harness

    harness()


if __name__ == "__main__":
    main()
