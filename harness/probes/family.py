"""The process that is probed, and the children that an engine has started: servers such as llama.cpp's."""

import contextlib
import os
from pathlib import Path


def family() -> list[int]:
    """This process's id and those of its living descendants; this process's alone where the kernel does not list
    children."""
    found, pending = list[int](), [os.getpid()]
    while pending:
        pid = pending.pop()
        found.append(pid)
        for listing in Path(f"/proc/{pid}/task").glob("*/children"):
            with contextlib.suppress(OSError, ValueError):  # a thread or a process that has just ended
                pending += [int(child) for child in listing.read_text().split()]
    return found
