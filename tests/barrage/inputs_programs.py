"""Programs and packages around the harness that are broken, shells that ask for completions, and pipes into `chat`."""

from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path

from tests.barrage import good
from tests.barrage.case import EITHER, FAILED, Case
from tests.barrage.inputs_surroundings import KIND
from tests.barrage.odd_files import put

_EXEC = 'exec "$@"'
#: What git, nvidia-smi, a compiler and the like do, as lines of sh.
_TOOLS: Mapping[str, str] = {
    "escapes": "printf '\\033[31mx\\007'",
    "fails": "exit 77",
    "killed": "kill -9 $$",
    "no-text": "printf '\\377\\376\\000'",
    "endless": "yes",
}
_PROGRAMS = ("git", "nvidia-smi", "docker", "c++", "g++")
_DECLARED = b"[offload_harness.engines]\nevil = evil:E\n"
_ABOUT = b"Metadata-Version: 2.1\nName: evil\nVersion: 1\n"
#: Entry points and metadata of an installed package, and its module.
_PACKAGES: Mapping[str, tuple[bytes, bytes, bytes]] = {
    "no-value": (b"[offload_harness.engines]\nevil\n", _ABOUT, b""),
    "entries-no-text": (b"\xff\xfe[x", _ABOUT, b""),
    "no-metadata": (_DECLARED, b"", b"class E: pass"),
    "metadata-no-text": (_DECLARED, b"\xff\xfe\0", b"class E: pass"),
    "escapes": (_DECLARED.replace(b"evil =", b"e\x1b[31mvil ="), _ABOUT + b"Summary: \x1b[31m\n", b""),
    "exits": (_DECLARED, _ABOUT, b"raise SystemExit(0)"),
    "raises": (_DECLARED, _ABOUT, b"raise RuntimeError('two\\nlines \\x1b[31m')"),
    "is-no-class": (_DECLARED, _ABOUT, b"E = 5"),
}
_WITH_PACKAGES: Mapping[str, tuple[tuple[str, ...], frozenset[int]]] = {
    "ls": (("ls", "engines"), frozenset({0})),
    "doctor": (("doctor",), frozenset({0, 1})),
    "run": ((*good.RUN, "--set", "engine=evil"), FAILED),
    "generate": ((*good.GENERATE, "--model", "fake", "--engine", "evil"), frozenset({2})),
}
_WORDS: Mapping[str, Mapping[str, str]] = {
    "no-words": {"COMP_CWORD": "1"},
    "no-number": {"COMP_WORDS": "harness ru", "COMP_CWORD": "one"},
    "unclosed": {"COMP_WORDS": "harness 'run", "COMP_CWORD": "1"},
    "beyond": {"COMP_WORDS": "harness", "COMP_CWORD": "99"},
    "digits": {"COMP_WORDS": "harness ru", "COMP_CWORD": "9" * 5000},
    "escapes": {"COMP_WORDS": "harness \x1b[31m", "COMP_CWORD": "1"},
}
_CHAT = ("chat", *good.FAKE, "--memory", "2GiB", "--max-tokens", "4")
#: What comes to `chat` through its standard input, and other ways to open it.
_MESSAGES: Mapping[str, bytes] = {
    "empty": b"",
    "invalid-utf8": b"\xff\xfe\nw3\n",
    "surrogate": b"\xed\xa0\x80\n",
    "nul": b"\0\n",
    "escapes": b"\x1b[31m\x07\n",
    "crlf": b"w3\r\n/stats\r\n/quit\r\n",
    "commands": b"/nonsense\n/stats\n/reset\n/quit\nnever read\n",
    "longer-than-fits": b"w" * 1_000_000,
    "separators": "w3\u2028w4\x85w5\n".encode(),
}
_PIPES: Mapping[str, str] = {
    "closed": "<&-",
    "endless": "</dev/zero",
    "for-writing": "0>x",
    "stdout-closed": "<stdin >&-",
    "stdout-full": "<stdin >/dev/full",
    "nobody-reads": "<stdin | true",
}


def cases() -> Iterator[Case]:
    """Tools on the PATH, packages on Python's path, words of a shell, and messages."""
    for name, script in _TOOLS.items():
        for command, (words, codes) in {"doctor": (("doctor",), frozenset({0, 1})), "run": (good.RUN, FAILED)}.items():
            yield Case(KIND, f"tools-{name}/{command}", words, partial(_put_tools, script), codes,
                       {"PATH": "bin:/usr/bin:/bin"})  # fmt: skip
    for name, package in _PACKAGES.items():
        for command, (words, codes) in _WITH_PACKAGES.items():
            yield Case(KIND, f"package-{name}/{command}", words, partial(_put_package, *package), codes,
                       {"PYTHONPATH": f"site:{good.ROOT}"}, shell=_EXEC)  # fmt: skip
    for name, variables in _WORDS.items():
        for shell in ("bash", "zsh", "fish"):
            asked = {"_HARNESS_COMPLETE": f"{shell}_complete"}
            yield Case(KIND, f"completion-{name}/{shell}", (), codes=FAILED, environment=asked | variables)
    for name, text in _MESSAGES.items():
        prepare = partial(_put_stdin, text)
        yield Case(KIND, f"chat/{name}", _CHAT, prepare, frozenset({0}), shell=f"{_EXEC} <stdin")
    for name, pipe in _PIPES.items():
        yield Case(KIND, f"chat-pipe/{name}", _CHAT, partial(_put_stdin, b"w3\n"), EITHER, shell=f'"$@" {pipe}')


def _put_tools(script: str, folder: Path) -> None:
    for name in _PROGRAMS:
        put(folder / "bin" / name, f"#!/bin/sh\n{script}\n".encode())
        (folder / "bin" / name).chmod(0o755)


def _put_package(entries: bytes, about: bytes, code: bytes, folder: Path) -> None:
    put(folder / "site" / "evil-1.dist-info" / "entry_points.txt", entries)
    put(folder / "site" / "evil-1.dist-info" / "METADATA", about)
    put(folder / "site" / "evil.py", code)


def _put_stdin(text: bytes, folder: Path) -> None:
    put(folder / "stdin", text)
