"""Runs programs that end with this process, even where it is killed, and with them all that they have started."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

#: Runs its arguments in its process group, which it kills when its standard input ends: the kernel closes the other end
#: with the process that holds it. A signal for the death of a parent would reach a compiler's driver, not its passes.
#: The first argument says how many of the next are a command to be run before that, once the program is killed.
_GUARD = """
import os, signal, subprocess, sys, threading
count = int(sys.argv[1])
last, command = sys.argv[2 : 2 + count], sys.argv[2 + count :]
orphaned = threading.Event()
def watch():
    os.read(0, 1)
    orphaned.set()
    try:
        if last:
            program.kill()
            subprocess.run(last, stdin=subprocess.DEVNULL, timeout=60)
    finally:
        os.killpg(0, signal.SIGKILL)
program = subprocess.Popen(command, stdin=subprocess.DEVNULL)
threading.Thread(target=watch, daemon=True).start()
code = program.wait()
if orphaned.is_set():
    signal.pause()
os._exit(code if code >= 0 else 128 - code)
"""
#: Becomes its arguments, after it asked Linux for SIGKILL at the death of the process whose id comes first.
_HEIR = """
import ctypes, os, sys
ctypes.CDLL(None).prctl(1, 9)
if os.getppid() == int(sys.argv[1]):
    os.execv(sys.argv[2], sys.argv[2:])
"""
_PYTHON = (sys.executable, "-I", "-S", "-c")


def run_tied(command: Sequence[str], scratch: Path, timeout_s: float) -> None:
    """Runs a program to its end, with its temporary files in the folder `scratch`.

    Raises subprocess.CalledProcessError with all that it printed as `stderr`, subprocess.TimeoutExpired, and OSError.
    """
    log = scratch / "output.log"
    reading, writing = os.pipe()  # no program that this process starts inherits the second
    try:
        with log.open("wb") as sink:
            process = subprocess.Popen(
                [*_PYTHON, _GUARD, "0", *command],
                stdin=reading, stdout=sink, stderr=sink, env=os.environ | {"TMPDIR": str(scratch)}, process_group=0,
            )  # fmt: skip
        try:
            code = process.wait(timeout_s)
        finally:
            os.close(writing)
            writing = -1
            process.wait()
        if code:
            raise subprocess.CalledProcessError(code, list(command), stderr=log.read_bytes())
    finally:
        os.close(reading)
        if writing >= 0:
            os.close(writing)
        with suppress(OSError):
            log.unlink()


def start_tied(command: Sequence[str], log: Path, last: Sequence[str] = ()) -> subprocess.Popen[bytes]:
    """Starts a program that goes on, in a process group of its own, which is killed when this process ends; the command
    `last` is run before that, for what no signal reaches. Its output goes to `log`. Raises OSError."""
    with log.open("wb") as sink:
        return subprocess.Popen(
            [*_PYTHON, _GUARD, str(len(last)), *last, *command],
            stdin=subprocess.PIPE, stdout=sink, stderr=sink, process_group=0,
        )  # fmt: skip


def stop_tied(process: subprocess.Popen[bytes], grace_s: float) -> None:
    """Ends a program of `start_tied` and all of its group: asks them, and kills what is left after `grace_s`."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGTERM)
    until = time.monotonic() + grace_s
    while time.monotonic() < until:
        process.poll()
        try:
            os.killpg(process.pid, 0)
        except ProcessLookupError:
            break
        time.sleep(0.05)
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    assert process.stdin is not None
    process.stdin.close()


def ending_with_this_thread(command: Sequence[str]) -> list[str]:
    """`command`, with an absolute path, as it must be started to be killed with the thread that starts it: for a
    program that starts no others. It takes no memory beside the program."""
    return [*_PYTHON, _HEIR, str(os.getpid()), *command]
