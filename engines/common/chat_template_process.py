"""The process that renders chat templates by transformers' own function; chat_template.py starts it and says why.

Each line of stdin is a request and each line of stdout its answer, both JSON; a first answer says that the process is
ready. It is run by its path and imports nothing of ours, so no folder of the user can stand in for our packages.
"""

import ctypes
import json
import os
import resource
import signal
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

#: Characters of an error that are passed on.
_LONGEST_ERROR = 1000


def main(parent: int, memory: int, cpu_s: float, text: int) -> None:
    """Answers requests of process `parent` until stdin ends; see `Limits` in chat_template.py for the other three."""
    _end_with(parent)
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what a library prints is no answer
    from transformers.utils.chat_template_utils import render_jinja_template

    _limit(memory)
    answer = b"{}"
    while True:
        answers.write(answer + b"\n")
        answers.flush()
        if not (line := sys.stdin.buffer.readline()):
            return
        signal.setitimer(signal.ITIMER_PROF, cpu_s)  # its signal ends this process, in the middle of C code too
        answer = _answer(render_jinja_template, line, text)
        signal.setitimer(signal.ITIMER_PROF, 0)


def _end_with(parent: int) -> None:
    """Asks Linux to kill this process when `parent` dies; elsewhere the end of stdin ends it, a conversation later."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
    if os.getppid() != parent:  # it died before the call
        sys.exit()


def _limit(memory: int) -> None:
    """Leaves this process no files to write, no new processes and, on Linux, `memory` bytes beyond those it has now."""
    limits = {resource.RLIMIT_CORE: 0, resource.RLIMIT_FSIZE: 0, resource.RLIMIT_NPROC: 0}
    if sys.platform == "linux":
        pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0])
        limits[resource.RLIMIT_AS] = pages * resource.getpagesize() + memory
    for limit, most in limits.items():
        hard = resource.getrlimit(limit)[1]
        lower = min({most, hard} - {resource.RLIM_INFINITY})
        resource.setrlimit(limit, (lower, lower))


def _answer(render: Callable[..., Any], line: bytes, most: int) -> bytes:
    try:
        return json.dumps(_rendered(render, json.loads(line), most), ensure_ascii=False).encode()
    except MemoryError:
        return b'{"outcome": "no memory"}'


def _rendered(render: Callable[..., Any], request: Mapping[str, Any], most: int) -> dict[str, str]:
    """A conversation's text, or why there is none. Raises MemoryError."""
    try:
        (text,), _ = render(
            conversations=[request["messages"]],
            chat_template=request["template"],
            add_generation_prompt=True,
            **request["special_tokens"],
        )
        size = len(text.encode())
    except MemoryError:
        raise
    except Exception as exc:  # a template is a program and raises its own errors
        line = str(exc)[:_LONGEST_ERROR].strip().partition("\n")[0] or type(exc).__name__
        # a terminal would obey the rest
        return {"outcome": "refused", "text": "".join(c if c.isprintable() else " " for c in line)}
    return {"outcome": "rendered", "text": text} if size <= most else {"outcome": "too long"}


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3]), int(sys.argv[4]))
