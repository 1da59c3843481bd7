"""A bad input: a command line, the files that it meets, and how it may end."""

import signal
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

#: Exit codes of an input that is refused, of one that may be good as well, and of jobs whose lines or cells may fail.
REFUSED, EITHER, FAILED = frozenset({2}), frozenset({0, 2}), frozenset({0, 1, 2})

#: Given as a secret: no output and no file may hold it.
SECRET = "xyzzy-hunter2"


def nothing(folder: Path) -> None:
    """Leaves the good files as they are."""


@dataclass(frozen=True)
class Case:
    """`harness *arguments` in a folder of its own with the good files of tests/barrage/good.py.

    `prepare` gets that folder and makes the bad files in it. `environment` goes over the usual variables, None removes
    one; relative paths start at the folder. `says` must be in what the command says. `shell` starts it as a process of
    its own, by a line of sh in which "$@" is the command; without it a fork of the runner runs it. `torch`: it imports
    torch. `interrupt_s`: when the signal `stop`, Ctrl-C for one, follows on the start of the harness.
    """

    kind: str
    name: str
    arguments: tuple[str, ...]
    prepare: Callable[[Path], object] = nothing
    codes: frozenset[int] = REFUSED
    environment: Mapping[str, str | None] = field(default_factory=dict)
    says: str = ""
    shell: str = ""
    torch: bool = False
    interrupt_s: float | None = None
    stop: int = signal.SIGINT

    @property
    def id(self) -> str:
        """What `--only` takes."""
        return f"{self.kind}/{self.name}"
