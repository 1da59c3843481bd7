"""Removes what the cache folder holds: only what the harness made, and nothing that a process builds or uses."""

import contextlib
import os
import shutil
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from harness.api import HarnessError
from harness.cache.entries import KINDS, Entry, Kind
from harness.common.locks import unused
from harness.common.regular_file import open_regular
from harness.common.system import LOCK_EX, LOCK_NB, flock
from harness.common.words import nearest

#: What can be had again without measuring or answering anew; `--unused-for` without a kind looks at these.
REPLACEABLE: tuple[Kind, ...] = ("models", "downloads", "weights", "environments", "kernels")
#: All that is ever removed.
KNOWN: tuple[Kind, ...] = tuple(kind for kind in KINDS if kind != "other")


@dataclass(frozen=True)
class Choice:
    """What is to go: by name, or by kind; of these only what is `outdated`, or unused since `before` (seconds of the
    epoch). What killed processes left goes unless names are given."""

    names: tuple[str, ...] = ()
    kinds: tuple[Kind, ...] = ()
    outdated: bool = False
    before: float | None = None


def chosen(entries: Sequence[Entry], choice: Choice) -> list[Entry]:
    """The entries that `choice` means. Raises HarnessError for a name that is not there, or that nobody here made."""
    if choice.names:
        return [_named(entries, name) for name in dict.fromkeys(choice.names)]
    filtered = choice.outdated or choice.before is not None
    kinds: Collection[Kind] = choice.kinds or (REPLACEABLE if filtered else ())

    def goes(entry: Entry) -> bool:
        if entry.kind == "other" or entry.state == "in use":
            return False
        if entry.state == "leftover":
            return True
        return (
            entry.kind in kinds
            and (entry.state == "outdated" or not choice.outdated)
            and (choice.before is None or entry.used < choice.before)
        )

    return [entry for entry in entries if goes(entry)]


def _named(entries: Sequence[Entry], name: str) -> Entry:
    known = {entry.name: entry for entry in entries}
    entry = known.get(name.rstrip("/"))
    if entry is None:
        hint = nearest(name, known, "`harness cache ls` lists what there is")
        raise HarnessError(f"the cache holds no {name!r}; {hint}")
    if entry.kind == "other":
        raise HarnessError(f"{entry.path} was not made by the harness; remove it yourself")
    return entry


def remove(cache: Path, entries: Sequence[Entry], note: Callable[[str], None]) -> int:
    """Removes entries; returns the bytes that were freed. `note` is told what could not be removed, and why.

    Raises HarnessError where a run or a job uses the cache.
    """
    freed = 0
    with unused(cache):
        for entry in entries:
            try:
                with _not_being_built(entry.path):
                    _remove(entry.path)
            except BlockingIOError:
                note(f"{entry.name} is being built: kept")
            except OSError as exc:
                note(f"{entry.name} cannot be removed: {exc.strerror or exc}")
            else:
                freed += entry.size
    return freed


@contextlib.contextmanager
def _not_being_built(path: Path) -> Iterator[None]:
    """Holds the lock of a folder's build, where there is one. Raises BlockingIOError while somebody builds it: pip goes
    on when the harness is killed."""
    lock = path.with_name(f"{path.name.partition('.tmp-')[0]}.lock")
    if not lock.exists():
        yield
        return
    with open_regular(lock, follow=False) as file:
        flock(file.fileno(), LOCK_EX | LOCK_NB)
        yield


def _remove(path: Path) -> None:
    """A folder gets another name first: one that is removed in part must not look complete."""
    if not path.is_dir() or path.is_symlink():
        path.unlink(missing_ok=True)
        return
    if ".tmp-" not in path.name:
        path = path.rename(path.with_name(f"{path.name}.tmp-{os.getpid()}"))
    shutil.rmtree(path)
