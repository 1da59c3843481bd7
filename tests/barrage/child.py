"""Becomes the command of a case, in a fork of the runner."""

import atexit
import os
import resource
import signal
import sys
import tempfile
import threading
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from tests.barrage.case import Case
from tests.barrage.good import ROOT
from tests.barrage.leftovers import MARK

#: Private memory, with and without torch, and the size of a file: what runs away ends before it fills the machine. The
#: address space has no limit: what draws charts reserves much of it.
_MEMORY_BYTES, _TORCH_MEMORY_BYTES, _FILE_BYTES = 3 << 30, 6 << 30, 1 << 30


def become(case: Case, folder: Path) -> NoReturn:
    """Runs the case in `folder`/work, with its output in `folder`/stdout and stderr, and ends this process as Python
    would."""
    try:
        _prepare(case, folder)
        if case.shell:
            command = [sys.executable, "-m", "harness", *case.arguments]
            os.execve("/bin/sh", ["sh", "-c", case.shell, "sh", *command], dict(os.environ))
        code = _main(case.arguments)
    except BaseException:  # of the barrage itself
        traceback.print_exc()
        code = 70
    finally:
        _leave(code)


def environment(case: Case, folder: Path) -> dict[str, str]:
    """The variables of a case: nothing outside its folder is written, and no network or container engine is there."""
    usual = {
        "PATH": os.environ.get("PATH", os.defpath),
        "HOME": str(folder / "home"),
        "TMPDIR": str(folder / "tmp"),
        "HARNESS_CACHE": str(folder / "work" / "cache"),
        "PYTHONPATH": str(ROOT),
        "LANG": "C.UTF-8",
        "CI": "true",
        "OMP_NUM_THREADS": "1",
        "OPENBLAS_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        "HF_DATASETS_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "DOCKER_HOST": f"unix://{folder}/no-engine.sock",
        MARK: folder.name,
    }
    return {name: value for name, value in {**usual, **case.environment}.items() if value is not None}


def _prepare(case: Case, folder: Path) -> None:
    os.setsid()
    for name, flags, number in (
        (os.devnull, os.O_RDONLY, 0),
        (folder / "stdout", os.O_WRONLY | os.O_CREAT, 1),
        (folder / "stderr", os.O_WRONLY | os.O_CREAT, 2),
    ):
        descriptor = os.open(name, flags, 0o600)
        os.dup2(descriptor, number)
        os.close(descriptor)
    sys.stdin = os.fdopen(0, closefd=False)
    sys.stdout = os.fdopen(1, "w", encoding="utf-8", closefd=False)
    sys.stderr = os.fdopen(2, "w", encoding="utf-8", errors="backslashreplace", buffering=1, closefd=False)
    variables = environment(case, folder)
    os.environ.clear()
    os.environ.update(variables)
    os.chdir(folder / "work")
    tempfile.tempdir = None  # what the runner found is not this case's
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for limit, most in (
        (resource.RLIMIT_DATA, _TORCH_MEMORY_BYTES if case.torch else _MEMORY_BYTES),
        (resource.RLIMIT_FSIZE, _FILE_BYTES),
        (resource.RLIMIT_CORE, 0),
    ):
        resource.setrlimit(limit, (most, most))


def _main(arguments: Sequence[str]) -> int:
    """The command's own entry point; its exit code."""
    from harness.cli.main import main

    sys.argv = ["harness", *arguments]
    try:
        main()
    except SystemExit as exc:
        return exc.code if isinstance(exc.code, int) else int(exc.code is not None)
    except BaseException:
        traceback.print_exc()
        return 1
    return 0


def _leave(code: int) -> NoReturn:
    """What the interpreter does at its end, then the end: to return would run the rest of the runner in this process.

    The runner registers nothing to do at exit, so that what runs here is the case's own."""
    try:
        threading._shutdown()
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
    except BaseException:
        code = 120
    os._exit(code)
