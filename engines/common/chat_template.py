"""Renders a model's chat template in a process of its own, with limits of time and memory.

A template is a program by whoever made the model. Jinja's sandbox keeps it from files and from Python's internals, but
lets it loop for ever and allocate without end.
"""

import json
import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from threading import Event, Timer
from typing import Any

from harness.api import HarnessError

_PROGRAM = Path(__file__).with_name("chat_template_process.py")
#: Seconds in which the process must be ready: it imports transformers, perhaps from a cold disk.
_START_S = 120.0
#: An answer holds up to six bytes for a byte of text (JSON's escapes), and little else.
_ESCAPED, _REST = 6, 1 << 16


@dataclass(frozen=True)
class Limits:
    """What a conversation may cost: `cpu_s` seconds of the process's CPU time and `wall_s` of the clock's, `memory`
    bytes beyond what the process starts with, `text` bytes of UTF-8 each for the request and for the text.

    `failures`: how many conversations, one after the other, may exceed time or memory before the template is not tried
    for `pause_s` seconds.
    """

    cpu_s: float = 10.0
    wall_s: float = 30.0
    memory: int = 512 << 20
    text: int = 16 << 20
    failures: int = 3
    pause_s: float = 60.0


LIMITS = Limits()


class ChatTemplate:
    """A chat template and the special tokens that it may name, as a tokenizer has them.

    The process starts with the first conversation and serves the others; it ends with `close`, and with the thread that
    started it.
    """

    def __init__(self, template: str, special_tokens: Mapping[str, str], limits: Limits = LIMITS) -> None:
        self._request: dict[str, Any] = {"template": template, "special_tokens": dict(special_tokens)}
        self._limits = limits
        self._process: subprocess.Popen[bytes] | None = None
        self._failures = 0  # since a conversation was within the limits
        self._tried_s = -math.inf  # when the last one failed
        self._reason = ""  # of the last failure

    def render(self, messages: Sequence[Mapping[str, str]]) -> str:
        """The text of a conversation up to the start of the answer, as transformers' `apply_chat_template` gives it.

        Raises HarnessError for messages that the template refuses or that cost more than the limits allow.
        """
        pause_s = self._limits.pause_s
        if self._failures >= self._limits.failures and time.monotonic() < self._tried_s + pause_s:
            what = f"the model's chat template {self._reason}"
            raise HarnessError(f"{what}; after {self._failures} failures it is not tried again for {pause_s:g} s")
        request = json.dumps(self._request | {"messages": [dict(m) for m in messages]}, ensure_ascii=False)
        line = request.encode("utf-8", "surrogatepass") + b"\n"
        if len(line) > self._limits.text:
            raise HarnessError(f"the messages and the model's chat template are longer than {_mib(self._limits.text)}")
        answer = self._answer(line)
        if answer["outcome"] in ("rendered", "refused", "too long"):
            self._failures = 0
        match answer["outcome"]:
            case "rendered":
                return str(answer["text"])
            case "refused":
                raise HarnessError(f"the model's chat template refuses these messages: {answer['text']}")
            case "too long":
                most = _mib(self._limits.text)
                raise HarnessError(f"the model's chat template makes more than {most} of text of these messages")
            case _:
                raise self._failed(f"needs more than {_mib(self._limits.memory)} of memory for one conversation")

    def close(self) -> None:
        """Ends the process; another conversation would start a new one. Idempotent."""
        if self._process is not None:
            process, self._process = self._process, None
            process.kill()
            process.communicate()  # closes the pipes, and waits: no zombie stays

    def _answer(self, line: bytes) -> Mapping[str, Any]:
        process = self._running()
        most = _ESCAPED * self._limits.text + _REST
        answer, late = _exchange(process, line, self._limits.wall_s, most)
        if answer.endswith(b"\n"):
            return dict(json.loads(answer))
        self.close()
        if late:
            raise self._failed(f"takes longer than {self._limits.wall_s:g} s for one conversation")
        if process.returncode == -signal.SIGPROF:
            raise self._failed(f"takes longer than {self._limits.cpu_s:g} s of CPU time for one conversation")
        raise self._failed(f"ends the process that renders it (exit code {process.returncode})")

    def _running(self) -> subprocess.Popen[bytes]:
        if self._process is not None and self._process.poll() is not None:  # somebody else ended it
            self.close()
        return self._process or self._started()

    def _started(self) -> subprocess.Popen[bytes]:
        figures = os.getpid(), self._limits.memory, self._limits.cpu_s, self._limits.text
        # -P: requests.py beside the program must not shadow the package of that name, nor a file in the user's folder
        command = [sys.executable, "-P", str(_PROGRAM), *map(str, figures)]
        try:
            self._process = process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                start_new_session=True,  # Ctrl-C is the parent's to handle
            )
        except OSError as exc:
            raise self._failed(f"cannot be rendered: no process starts ({exc.strerror})") from exc
        ready, late = _exchange(process, b"", _START_S, _REST)
        if late or not ready.endswith(b"\n"):
            self.close()
            raise self._failed(f"cannot be rendered: its process ends at the start (exit code {process.returncode})")
        return process

    def _failed(self, reason: str) -> HarnessError:
        """Counts a failure, whose process ends, and returns its error."""
        self.close()
        self._failures += 1
        self._tried_s = time.monotonic()
        self._reason = reason
        return HarnessError(f"the model's chat template {reason}")


def _exchange(process: subprocess.Popen[bytes], line: bytes, seconds: float, most: int) -> tuple[bytes, bool]:
    """Sends a line. Returns the line that comes back, or less of it if the process ends or it has more than `most`
    bytes, and whether it took longer than `seconds`: then the process was killed."""
    assert process.stdin is not None
    assert process.stdout is not None
    late = Event()

    def end() -> None:
        late.set()
        process.kill()

    timer = Timer(seconds, end)
    timer.start()
    try:
        with suppress(BrokenPipeError):  # it has ended: so will its answer
            process.stdin.write(line)
            process.stdin.flush()
        answer = process.stdout.readline(most)
    except BaseException:  # Ctrl-C: the answer to come would be taken for that to the next line
        end()
        raise
    finally:
        timer.cancel()
        timer.join()  # from here on the process is safe or killed
        if late.is_set():
            process.wait()
    return answer, late.is_set()


def _mib(size: int) -> str:
    return f"{size >> 20} MiB"
