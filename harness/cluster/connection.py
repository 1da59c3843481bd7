"""The Ray cluster that a command uses: connected to, asked for its nodes, and seen to go away."""

import importlib.util
import logging
import os
import signal
import socket
import threading
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from harness.api import HarnessError, first_line
from harness.cluster.placement import Node
from harness.common.packages import install_extra

#: How long an address may take to answer, and how long a cluster may be silent, in seconds. Ray itself ends the whole
#: process after a minute of silence.
_ANSWER_S, _SILENCE_S = 5.0, 20.0
_POLL_S = 0.5
AUTO = "auto"


class Cluster:
    """A cluster that this process is connected to; `head` is its head's HOST:PORT, and `gone` whether it was lost."""

    def __init__(self, head: str) -> None:
        self.head = head
        self.gone = False

    def nodes(self) -> list[Node]:
        """The nodes that are alive. Raises HarnessError where the cluster is gone."""
        return [node for node, alive in self._nodes() if alive]

    def name_of(self, node_id: str) -> str:
        """The name of a node, alive or not."""
        return next((node.name for node, _ in self._nodes() if node.id == node_id), node_id)

    def _nodes(self) -> list[tuple[Node, bool]]:
        import ray

        self.require_alive()  # Ray would wait for it
        return [
            (Node(row["NodeID"], row.get("NodeName") or row["NodeManagerAddress"], row["Resources"]), row["Alive"])
            for row in ray.nodes()
        ]

    def require_alive(self) -> None:
        """Waits for the cluster's head to answer. Raises HarnessError where it does not for a while."""
        deadline = time.monotonic() + _SILENCE_S
        while not answers(self.head):
            if time.monotonic() > deadline:
                self.gone = True
                raise HarnessError(_gone(self.head))
            time.sleep(_POLL_S)


@contextmanager
def connected(address: str) -> Iterator[Cluster]:
    """The cluster at an address, `auto` for the one that runs on this host.

    Raises HarnessError in one line where Ray is not installed, where nobody answers, and for a cluster of another
    version of Ray or Python.
    """
    if importlib.util.find_spec("ray") is None:
        raise HarnessError(f"--ray needs Ray: {install_extra('ray')}")
    if "://" in address:
        raise HarnessError(f"--ray {address}: give HOST:PORT of the cluster's head, and run this on one of its nodes")
    if address != AUTO and not answers(address):
        raise HarnessError(
            f"--ray {address}: nobody answers there; give HOST:PORT of the cluster's head, as `ray start --head` says"
        )
    os.environ.setdefault("RAY_DEDUP_LOGS_SKIP_REGEX", ".")  # it would print of every worker that dies, on stdout
    with signals_held():
        import ray

    handler = signal.getsignal(signal.SIGTERM)  # which Ray replaces
    try:
        with warnings.catch_warnings(action="ignore"):
            ray.init(address=address, logging_level=logging.ERROR, log_to_driver=False)
    except Exception as exc:
        raise HarnessError(f"--ray {address}: {_reason(exc)}") from exc
    except SystemExit:  # of Ray's handler
        signal.signal(signal.SIGTERM, handler)
        signal.raise_signal(signal.SIGTERM)
        raise
    finally:
        with suppress(ValueError):  # not in the main thread
            signal.signal(signal.SIGTERM, handler)
    try:
        yield Cluster(ray.get_runtime_context().gcs_address)
    except ray.exceptions.RaySystemError as exc:
        raise HarnessError(_gone(address)) from exc
    finally:
        ray.shutdown()


@contextmanager
def signals_held() -> Iterator[None]:
    """SIGINT and SIGTERM come when the context ends: while Ray is imported, what handlers raise may be dropped."""
    came: list[int] = []
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    handlers = {
        signum: signal.signal(signum, lambda number, frame: came.append(number))
        for signum in (signal.SIGINT, signal.SIGTERM)
        if signal.getsignal(signum) != signal.SIG_IGN
    }
    try:
        yield
    finally:
        for signum, handler in handlers.items():
            signal.signal(signum, handler)
        for number in came[:1]:
            signal.raise_signal(number)


def answers(address: str) -> bool:
    """Whether somebody listens at HOST:PORT."""
    host, _, port = address.rpartition(":")
    with suppress(OSError, ValueError, OverflowError), socket.create_connection((host, int(port)), _ANSWER_S):
        return True
    return False


def _gone(head: str) -> str:
    return f"the Ray cluster of {head} went away; start it and run the same command again to go on"


def _reason(exc: Exception) -> str:
    """Why Ray did not connect, in one line with what to do."""
    if isinstance(exc, ConnectionError):
        return "no Ray cluster runs on this host; start one by `ray start --head`, or give the address of its head"
    if "ersion mismatch" in str(exc):
        return " ".join(str(exc).split())
    return f"{first_line(exc)}; run this command on a node of the cluster"
