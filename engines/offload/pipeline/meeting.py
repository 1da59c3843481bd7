"""Where ranks that torchrun or srun started meet: a store of torch.distributed, in which rank 0 says when to join, and
with what exit status it ended."""

import json
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from functools import cache
from typing import Any

from torch._C._distributed_c10d import PrefixStore, TCPStore

from engines.offload.pipeline.started import own_rank, world
from harness.api import HarnessError, first_line

#: How long ranks wait for the store, as torch.distributed does by default, and for what rank 0 says in it, in seconds.
_STORE_S, _PATIENCE_S = 1800.0, 24 * 3600.0
#: How long rank 0 stays for the others to learn that it ended, in seconds: those that may still be starting, and those
#: that had joined.
_STARTING_S, _JOINED_S = 300.0, 2.0
_LOOK_S = 0.05
_JOIN, _ENDED, _LEFT = "join", "ended", "left"
#: torch.distributed's: whether somebody else holds the store, as torchrun's agent may.
_HELD = "TORCHELASTIC_USE_AGENT_STORE"


class LeaderEndedError(HarnessError):
    """Rank 0 ended, with exit status `code`, before this rank was told what to do."""

    def __init__(self, code: int, reason: str) -> None:
        failure = f"rank 0 failed: {reason}" if reason else f"rank 0 ended with exit status {code}"
        super().__init__(failure if code else "nothing to do: rank 0 has ended")
        self.code = code


@cache
def meeting_store() -> Any:
    """The store of this job, one a process. Rank 0 holds it, unless torchrun's agent does, from the first call on.

    Raises HarnessError where it cannot be reached.
    """
    rank, ranks = own_rank(), world()
    try:
        host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        holds = rank == 0 and os.environ.get(_HELD) != str(True)
        store = TCPStore(host, port, ranks, holds, timedelta(seconds=_STORE_S), wait_for_workers=False)
    except KeyError as exc:
        raise HarnessError(f"the environment of rank {rank} has no {exc.args[0]}: set it on all ranks") from exc
    except (RuntimeError, ValueError) as exc:
        raise HarnessError(not_met(exc)) from exc
    if holds:
        os.environ[_HELD] = str(True)  # a cell's worker, which is rank 0 then, finds it here
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")  # torchrun's agent keeps its store for another
    return PrefixStore(f"harness/{attempt}", store)


def not_met(exc: BaseException) -> str:
    """In words, that this rank did not reach the others."""
    where = f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"
    return f"rank {own_rank()} of {world()} did not meet the others at {where}: {first_line(exc)}"


def call_ranks(store: Any) -> None:
    """Has the others join. Raises HarnessError where they have joined before: they serve one load."""
    if store.add("loads", 1) > 1:
        raise HarnessError("the other ranks have served a load and ended: start the same command again on all of them")
    store.set(_JOIN, "yes")


def await_call(store: Any) -> None:
    """On another rank: until rank 0 has the ranks join. Raises as `await_leader`."""
    await_leader(store, _JOIN)


def await_leader(store: Any, key: str) -> None:
    """Until rank 0 has set the key, without a long operation, which would keep this rank's pulse from the store.

    Raises LeaderEndedError where it ended instead, HarnessError where it takes a day.
    """
    deadline = time.monotonic() + _PATIENCE_S
    try:
        while not store.check([key]):
            if store.check([_ENDED]):
                ended = LeaderEndedError(**json.loads(store.get(_ENDED)))
                leave(store)
                raise ended
            if time.monotonic() > deadline:
                raise HarnessError(f"rank 0 did not say for {_PATIENCE_S:g} s what to do")
            time.sleep(_LOOK_S)
    except RuntimeError as exc:  # the store was in rank 0's process, which somebody killed
        raise LeaderEndedError(1, f"its store is gone ({first_line(exc)})") from exc


def leave(store: Any) -> None:
    """Says that this rank needs the store no more."""
    with suppress(RuntimeError):  # it is gone already
        store.add(_LEFT, 1)


@contextmanager
def led() -> Iterator[None]:
    """Rank 0's command: however it ends, the other ranks learn of it, and the store stays until they have."""
    store, others = meeting_store(), (world() or 1) - 1
    code, reason = 0, ""
    try:
        yield
    except BaseException as exc:
        code, reason = _status(exc), _words(exc)
        raise
    finally:
        with suppress(RuntimeError):  # the agent that holds the store is gone, and ends the ranks
            store.set(_ENDED, json.dumps({"code": code, "reason": reason}))
            deadline = time.monotonic() + (_JOINED_S if store.check([_JOIN]) else _STARTING_S)
            while store.add(_LEFT, 0) < others and time.monotonic() < deadline:
                time.sleep(_LOOK_S)


def _status(exc: BaseException) -> int:
    """The exit status of a process that ends with an exception."""
    if not isinstance(exc, SystemExit):
        return 1
    return exc.code if isinstance(exc.code, int) else int(exc.code is not None)


def _words(exc: BaseException) -> str:
    """Why a command ended: what it printed of the error that led to its exit status."""
    error = exc.__context__ if isinstance(exc, SystemExit) else exc
    return "" if error is None or not str(error).strip() else first_line(error)
