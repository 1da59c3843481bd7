"""What every sandbox does: writes the request, follows the worker's events, reads its result and its log."""

import contextlib
import errno
import json
import os
import shutil
import stat
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from harness.api import HarnessError, WorkerRequest, WorkerResult, from_json, to_json, without_these
from harness.common.classify import DISK_FULL
from harness.common.files import replacing
from harness.common.regular_file import open_regular, parse_json
from harness.hardware import provenance
from harness.launchers.protocol import EVENTS, REQUEST, RESULT

_POLL_S = 0.05
#: How long after its time a worker ends by itself, where nobody ended it.
_GRACE_S = 60.0
_LOG_TAIL_LINES, _LOG_TAIL_BYTES = 3, 1 << 20


def settings(threads: int | None, gpu: bool, env: Mapping[str, str]) -> dict[str, str]:
    """Environment variables of a worker, with `env` of its cell. A worker without `gpu` sees no device: engines would
    take one unasked."""
    variables = {
        "PYTHONUNBUFFERED": "1",
        "PYTHONFAULTHANDLER": "1",
        "HF_HUB_DISABLE_PROGRESS_BARS": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "HF_HUB_DISABLE_TELEMETRY": "1",
        "DO_NOT_TRACK": "1",
    }
    if threads is not None:
        variables |= {"OMP_NUM_THREADS": str(threads), "MKL_NUM_THREADS": str(threads)}
    return variables | ({"CUDA_DEVICE_ORDER": "PCI_BUS_ID"} if gpu else {"CUDA_VISIBLE_DEVICES": ""}) | dict(env)


@contextlib.contextmanager
def opened(request: WorkerRequest, parent: int) -> Iterator[int]:
    """The exchange folder with the request in it, for as long as the worker lives; gives the offset in the log at which
    the worker's part begins.

    `parent`: the process whose death ends the worker, as the worker numbers it. Raises HarnessError for what cannot be
    written.
    """
    folder, log, kind = request.exchange.folder, request.exchange.log, type(request.work).__name__
    shutil.rmtree(folder, ignore_errors=True)
    try:
        folder.mkdir(parents=True)
        message = {
            "kind": kind,
            "work": to_json(request.work),
            "parent": parent,
            "longest_s": request.timeout_s + _GRACE_S,
        }
        (folder / REQUEST).write_text(json.dumps(message))
        with open_regular(log, "ab", follow=False) as sink:
            sink.write(f"=== {kind} {provenance.now()}\n".encode())
            start = sink.tell()
        yield start
    except OSError as exc:
        where = exc.filename or folder
        option = "--cache-dir" if str(where).startswith(str(folder)) else "--out"
        hint = "free space" if exc.errno in DISK_FULL else f"choose another {option}"
        raise HarnessError(f"cannot write to {where}: {exc.strerror}; {hint}") from exc
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def watch(request: WorkerRequest, ended: Callable[[], bool]) -> bool:
    """Delivers events until the worker has `ended` or its time is over; returns whether its time is over."""
    deadline = time.monotonic() + request.timeout_s
    events = _follow(request.exchange.folder / EVENTS)
    while True:
        over = ended()
        for event in next(events):
            request.exchange.on_event(event["phase"], event["done"], event["total"])
        if over:
            return False
        if time.monotonic() > deadline:
            return True
        time.sleep(_POLL_S)


def read_result(folder: Path) -> WorkerResult | None:
    """The worker's result from its exchange folder, None where there is no whole one: the worker renames it into
    place."""
    try:
        return from_json(WorkerResult, parse_json(_plain(folder / RESULT)))
    except (OSError, ValueError, HarnessError):
        return None


def log_tail(log: Path, offset: int) -> str:
    """The last line of a log after `offset` that names an error, else its last lines, as one line."""
    with open_regular(log) as file:
        file.seek(max(offset, file.seek(0, os.SEEK_END) - _LOG_TAIL_BYTES))
        text = file.read(_LOG_TAIL_BYTES).decode(errors="replace")
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    # what follows such a line are only addresses
    telling = [line for line in lines if "Error" in line or "Fatal" in line]
    return " | ".join(telling[-1:] or lines[-_LOG_TAIL_LINES:])[:800] or "(none)"


def hide_in_log(log: Path, secrets: frozenset[str]) -> None:
    """Replaces what an engine printed of `secrets`. A log that cannot be written anew stays, and nothing fails."""
    with contextlib.suppress(OSError):
        if not secrets or not log.exists():
            return
        with open_regular(log, follow=False) as old:
            text = old.read().decode(errors="surrogateescape")
        hidden = without_these(text, secrets)
        if hidden != text:
            with replacing(log) as new:
                new.write(hidden.encode(errors="surrogateescape"))


def _follow(path: Path) -> Iterator[list[dict[str, Any]]]:
    """Yields, at each call of next, the complete new lines of a growing JSON-lines file."""
    position = 0
    while True:
        lines: list[dict[str, Any]] = []
        with contextlib.suppress(OSError, ValueError):
            for line in _plain(path, position).splitlines(keepends=True):
                if not line.endswith(b"\n"):
                    break
                position += len(line)
                lines.append(parse_json(line))
        yield lines


def _plain(path: Path, offset: int = 0) -> bytes:
    """A file's bytes. Raises OSError for a link or a pipe: a container may put one where the harness reads."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    with os.fdopen(descriptor, "rb") as file:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise OSError(errno.EINVAL, "not a plain file", str(path))
        file.seek(offset)
        return file.read()
