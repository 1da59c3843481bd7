"""Network namespaces of Linux without names: the kernel removes one, with its interfaces, when nothing holds it."""

import ctypes
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

T = TypeVar("T")

_CLONE_NEWNET = 0x40000000  # sched.h
_OWN = "/proc/thread-self/ns/net"


def make_namespace() -> int:
    """Moves this thread to a new namespace; returns a descriptor that holds it. Raises OSError."""
    _call("unshare", _CLONE_NEWNET)
    return os.open(_OWN, os.O_RDONLY)


def enter(descriptor: int) -> None:
    """Moves this thread to a namespace; processes that it starts are there too. Raises OSError."""
    _call("setns", descriptor, _CLONE_NEWNET)


def inside(namespace: Path, make: Callable[[], T]) -> T:
    """What `make` returns in the namespace of this file. A socket stays in the namespace in which it was made. Raises
    OSError."""

    def entered() -> T:
        descriptor = os.open(namespace, os.O_RDONLY)
        try:
            enter(descriptor)
        finally:
            os.close(descriptor)
        return make()

    with ThreadPoolExecutor(1) as pool:  # a thread of its own, as this one must stay where it is
        return pool.submit(entered).result()


def _call(function: str, *arguments: int) -> None:
    """Calls a function of the C library, which Python 3.12 has in `os`."""
    if getattr(ctypes.CDLL(None, use_errno=True), function)(*arguments) != 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))
