"""Commands of the harness in a Python that looks like that of another operating system.

`python -m tests.other_system SYSTEM [LIBRARY...]` reads a list of argument lists as JSON from stdin and prints for each
its exit code and what it printed. Linux's modules, calls and files are hidden before any of our modules is imported;
libraries are imported before that, as those of this system would fail in a Python of another.
"""

import builtins
import contextlib
import importlib
import io
import json
import os
import pathlib
import platform
import shutil
import signal
import sys
import traceback
import types
from collections.abc import Sequence
from typing import Any

#: What Python lacks on macOS, by module.
_NOT_MACOS = {
    os: ("sched_getaffinity", "sched_setaffinity", "posix_fadvise", "posix_fallocate", "O_DIRECT", "O_TMPFILE",
         "memfd_create", "sendfile", "getresuid", "POSIX_FADV_DONTNEED"),
    signal: ("sigwaitinfo", "sigtimedwait"),
}  # fmt: skip
#: And on Windows beside these.
_NOT_WINDOWS = {
    os: ("fork", "forkpty", "killpg", "setsid", "getpgid", "getuid", "geteuid", "getgid", "getegid", "getloadavg",
         "pread", "preadv", "pwrite", "pwritev", "fchmod", "fchown", "chown", "mkfifo", "sysconf", "statvfs", "uname",
         "nice", "wait4", "O_NONBLOCK", "O_NOFOLLOW", "O_DIRECTORY", "O_CLOEXEC", "fdatasync", "lchown", "posix_spawn"),
    signal: ("SIGHUP", "SIGKILL", "SIGALRM", "SIGUSR1", "SIGPIPE", "alarm", "setitimer", "pthread_sigmask"),
}  # fmt: skip
#: Python's modules that only Unix has.
_UNIX = ("fcntl", "resource", "pwd", "grp", "termios", "tty", "pty", "syslog")
_LINUX_FOLDERS = ("/proc", "/sys", "/run")
_SYSTEMS = {"darwin": "Darwin", "win32": "Windows"}


def pretend(system: str, libraries: Sequence[str]) -> None:
    """Makes this Python look like one for `system`, a value of sys.platform, to what is imported after `libraries`."""
    for name in libraries:
        importlib.import_module(name)
    usage = shutil.disk_usage("/")
    lacking = [_NOT_MACOS] if system == "darwin" else [_NOT_MACOS, _NOT_WINDOWS]
    for names in lacking:
        for module, missing in names.items():
            for name in missing:
                if hasattr(module, name):
                    delattr(module, name)
    if system == "win32":
        sys.modules["msvcrt"] = _msvcrt()
        _refuse(*_UNIX)
        _open_no_folders()
        shutil.disk_usage = lambda path: usage
    _hide_folders()
    sys.platform = system
    platform.system = lambda: _SYSTEMS[system]
    platform.processor = lambda: ""


def _msvcrt() -> types.ModuleType:
    """Windows's module of that name, as far as we use it."""
    import fcntl

    module = types.ModuleType("msvcrt")

    def locking(descriptor: int, mode: int, nbytes: int) -> None:
        assert mode == module.LK_NBLCK
        fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB, nbytes, 0, os.SEEK_CUR)

    module.LK_NBLCK, module.locking = 2, locking
    return module


def _refuse(*modules: str) -> None:
    """Makes imports of `modules` fail, from modules that are imported from now on."""
    original = builtins.__import__

    def refusing(name: str, *rest: Any, **named: Any) -> Any:
        if name in modules:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
        return original(name, *rest, **named)

    for name in modules:
        sys.modules.pop(name, None)
        sys.modules[name] = None  # what importlib takes for missing
    builtins.__import__ = refusing


def _open_no_folders() -> None:
    original = os.open

    def opening(path: Any, flags: int, *rest: Any, **named: Any) -> int:
        if pathlib.Path(os.fsdecode(path)).is_dir():
            raise PermissionError(13, "Permission denied", str(path))
        return original(path, flags, *rest, **named)

    os.open = opening


def _hide_folders() -> None:
    """Our code reads Linux's files by pathlib; psutil, which knows this system, does not."""

    def hidden(path: pathlib.Path) -> bool:
        return str(path).startswith(_LINUX_FOLDERS)

    for name in ("open", "read_text", "read_bytes", "readlink", "stat", "iterdir"):
        original = getattr(pathlib.Path, name)

        def missing(self: pathlib.Path, *rest: Any, original: Any = original, **named: Any) -> Any:
            if hidden(self):
                raise FileNotFoundError(2, "No such file or directory", str(self))
            return original(self, *rest, **named)

        setattr(pathlib.Path, name, missing)


def _run(arguments: Sequence[str]) -> tuple[int, str]:
    """The exit code of a command, and what it printed on both streams."""
    from harness.cli.main import main

    out = io.TextIOWrapper(io.BytesIO(), encoding="utf-8", write_through=True)
    sys.argv = ["harness", *arguments]
    code = 0
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(out):
        try:
            main()
        except SystemExit as exc:
            code = exc.code if isinstance(exc.code, int) else int(exc.code is not None)
        except Exception:
            return -1, traceback.format_exc()
    out.seek(0)
    return code, out.read()


if __name__ == "__main__":
    pretend(sys.argv[1], sys.argv[2:])
    sys.stdout.write(json.dumps([_run(arguments) for arguments in json.load(sys.stdin)]))
