"""Surroundings that a process may find: variables, streams, folders and limits, and signals while it starts.

Each is a process of its own, since these act before our first line. Signals come no sooner than our handlers: until
then Python itself starts, and says so by a traceback.
"""

import os
import random
import signal
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path

from tests.barrage import good
from tests.barrage.case import EITHER, FAILED, Case, nothing
from tests.barrage.odd_files import SPECIAL, put_special

KIND = "surroundings"
_EXEC = 'exec "$@"'
_COMMANDS: Mapping[str, tuple[str, ...]] = {
    "validate": ("validate", "tiny.yaml"),
    "report": ("report", "rec", "--out", "r.md"),
    "generate": (*good.GENERATE, *good.FAKE),
    "run": good.RUN,
    "doctor": ("doctor",),
}
#: Variables that change nothing.
_HARMLESS: Mapping[str, Mapping[str, str | None]] = {
    "no-home": {"HOME": None},
    "home-missing": {"HOME": "/nowhere"},
    "home-is-a-file": {"HOME": "file"},
    "home-empty": {"HOME": ""},
    "no-path": {"PATH": None},
    "path-missing": {"PATH": "/nowhere"},
    "path-is-a-file": {"PATH": "file"},
    "cxx-unclosed": {"CXX": "g++ 'unclosed"},
    "cxx-folder": {"CXX": "/"},
    "cxx-fails": {"CXX": "false"},
    "cxx-missing": {"CXX": "/nowhere/g++ -O2"},
    "cxx-blank": {"CXX": " "},
    "no-tmpdir": {"TMPDIR": None},
    "tmpdir-missing": {"TMPDIR": "nowhere"},
    "tmpdir-is-a-file": {"TMPDIR": "file"},
    "lang-c": {"LANG": "C", "LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"},
    "locale-unknown": {"LC_ALL": "xx_YY.nonsense"},
    "ascii": {"PYTHONIOENCODING": "ascii"},
    "latin-1": {"PYTHONIOENCODING": "latin-1"},
    "columns": {"COLUMNS": "-1", "LINES": "many"},
    "terminal": {"TERM": "\x1b[31m", "CI": None},
    "time-zone": {"TZ": "Nowhere/Nowhere"},
    "threads": {"OMP_NUM_THREADS": "many", "MKL_NUM_THREADS": "-1"},
    "devices": {"CUDA_VISIBLE_DEVICES": "99,x"},
}
#: Caches that no command can use, and those that some can.
_CACHES: Mapping[str, str] = {
    "file": "file",
    "below-a-file": "file/cache",
    "long": "x" * 5000,
    "deep": "x/" * 300,
    "escapes": "\x1b[31mcache\n",
    "device": "/dev/full",
    "proc": "/proc/nowhere",
}
_STREAMS: Mapping[str, str] = {
    "no-stdin": "<&-",
    "no-stdout": ">&-",
    "no-stderr": "2>&-",
    "no-streams": "<&- >&- 2>&-",
    "full-stdout": ">/dev/full",
    "full-stderr": "2>/dev/full",
    "full-both": ">/dev/full 2>&1",
}
_LIMITS: Mapping[str, str] = {
    "memory-1.5-gb": "ulimit -v 1500000",
    "files-32": "ulimit -n 32",
    "files-16": "ulimit -n 16",
    "size-0": "ulimit -f 0",
    "size-1": "ulimit -f 1",
    "size-16": "ulimit -f 16",
    "no-rights": "umask 777",
}
_MOMENTS = 8


def cases() -> Iterator[Case]:
    """Variables, caches, streams, folders, limits and interruptions."""
    for name, variables in _HARMLESS.items():
        for command, words in _COMMANDS.items():
            codes = frozenset({0, 1}) if command == "doctor" else frozenset({0})
            yield _case(f"{name}/{command}", words, codes, variables)
    yield from _caches()
    for name, redirection in _STREAMS.items():
        for command, words in _COMMANDS.items():
            codes = FAILED if command == "doctor" else EITHER
            yield _case(f"{name}/{command}", words, codes, shell=f"{_EXEC} {redirection}")
        # a refusal stays one, whoever hears of it
        yield _case(f"{name}/refused", ("report", "nowhere"), frozenset({2}), shell=f"{_EXEC} {redirection}")
    gone = f"mkdir gone && cd gone && rmdir ../gone && {_EXEC}"
    for command, words in (*_COMMANDS.items(), ("ls", ("ls", "hardware")), ("shipped", ("validate", "quickstart"))):
        yield _case(f"gone/{command}", words, FAILED, shell=gone)
    for name, limit in _LIMITS.items():
        for command, words in _COMMANDS.items():
            yield _case(f"{name}/{command}", words, FAILED, shell=f"{limit}; {_EXEC}")
    if os.geteuid():  # root may write anywhere
        yield _case("tmpdir-read-only/run", good.RUN, frozenset({0}), {"TMPDIR": "/"})
    yield _case("history-of-nonsense/show", ("history", "show"), frozenset({2}), {"HARNESS_HISTORY": "nonsense"})
    for command, words in _COMMANDS.items():
        variables = {"SOURCE_DATE_EPOCH": "nonsense"}
        yield _case(f"source-date-epoch/{command}", words, frozenset({2}), variables)
    yield from _interruptions()


def _interruptions() -> Iterator[Case]:
    for command, words in (*_COMMANDS.items(), ("plan", good.PLAN)):
        for i in range(_MOMENTS):
            moment = random.Random(f"{command} {i}").uniform(0.0, 0.3)
            codes = frozenset({0, 130}) | ({1} if command == "doctor" else set())
            yield Case(KIND, f"interrupt/{command}/{i}", words, codes=codes, shell=_EXEC, interrupt_s=moment)
        for stop in (signal.SIGTERM, signal.SIGHUP):
            for i in range(_MOMENTS // 2):  # as late as workers run
                moment = random.Random(f"{command} {stop} {i}").uniform(0.0, 1.5)
                codes = frozenset({0, 128 + stop}) | ({1} if command == "doctor" else set())
                yield Case(KIND, f"{stop.name.lower()}/{command}/{i}", words, codes=codes, shell=_EXEC,
                           interrupt_s=moment, stop=stop)  # fmt: skip


def _case(
    name: str, words: tuple[str, ...], codes: frozenset[int], variables: Mapping[str, str | None] | None = None,
    shell: str = _EXEC, prepare=nothing,
) -> Case:  # fmt: skip
    return Case(KIND, name, words, prepare, codes, variables or {}, shell=shell)


def _caches() -> Iterator[Case]:
    commands = (("run", good.RUN), ("doctor", ("doctor",)), ("report", ("report", "rec", "--out", "r.html")))
    for command, words in commands:
        for name, cache in _CACHES.items():
            yield _case(f"cache-{name}/{command}", words, FAILED, {"HARNESS_CACHE": cache})
        for special in SPECIAL:
            put = partial(_put_cache, special=special)
            yield _case(f"cache-{special}/{command}", words, FAILED, prepare=put)
        # without both, the cache is below HOME
        home = {"HARNESS_CACHE": None, "XDG_CACHE_HOME": None, "HOME": "file"}
        yield _case(f"cache-in-a-file/{command}", words, FAILED, home)


def _put_cache(folder: Path, special: str) -> None:
    put_special(folder / "cache", special)
