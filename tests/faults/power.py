"""Replays the shim's record of a command up to a power cut, into a state that the disk may then have.

The model: a file's writes since its last sync may each be lost, torn, or kept; of the changes of a folder's names
since its last sync only the first ones may be kept, whatever became of the files' data. A folder that was made stays.
"""

import random
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path


@dataclass(frozen=True)
class Entry:
    """A call that succeeded: of kind `call`, on `path`, renamed to `to`; `offset` is a size for truncate."""

    call: str
    path: str
    to: str
    offset: int
    data: bytes


@dataclass
class _File:
    durable: bytes = b""
    pending: list[Entry] = field(default_factory=list)
    last_write: int = 0  # where the last write began: what came before it was acknowledged

    def content(self) -> bytes:
        """What a reader sees without a cut."""
        return _applied(self.durable, self.pending)


@dataclass
class _Folder:
    durable: dict[str, _File] = field(default_factory=dict)
    changes: list[dict[str, _File | None]] = field(default_factory=list)  # since the last sync: names, and their files

    def names(self, changes: int | None = None) -> dict[str, _File]:
        """Its names after so many of the changes, None for all."""
        names = dict(self.durable)
        for change in self.changes[:changes]:
            for name, file in change.items():
                if file is None:
                    names.pop(name, None)
                else:
                    names[name] = file
        return names


def encoded(entry: Entry) -> bytes:
    """An entry as the shim writes it."""
    head = "\t".join((entry.call, entry.path, entry.to, str(entry.offset), str(len(entry.data))))
    return head.encode() + b"\n" + entry.data


def entries(log: Path) -> list[Entry]:
    """What the shim recorded."""
    found, data, position = list[Entry](), log.read_bytes(), 0
    while position < len(data):
        end = data.index(b"\n", position)
        call, path, to, offset, size = data[position:end].decode().split("\t")
        position = end + 1 + int(size)
        found.append(Entry(call, path, to, int(offset), data[end + 1 : position]))
    return found


class Disk:
    """The disk below `folder`, which is empty at first, as a command changes it."""

    def __init__(self, folder: Path) -> None:
        self._root = str(folder)
        self._folders: dict[str, _Folder] = {self._root: _Folder()}

    def apply(self, entry: Entry) -> None:
        """Takes the next call."""
        parent, name = self._place(entry.path)
        file = parent.names().get(name)
        match entry.call:
            case "mkdir":
                self._folders.setdefault(entry.path, _Folder())
            case "create":
                parent.changes.append({name: _File()})
            case "unlink":
                parent.changes.append({name: None})
                self._folders.pop(entry.path, None)
            case "rename":
                self._rename(entry, parent, name, file)
            case "sync" if entry.path in self._folders:
                folder = self._folders[entry.path]
                folder.durable, folder.changes = folder.names(), []
            case "sync" if file is not None:
                file.durable, file.pending = file.content(), []
            case "write" | "truncate" if file is not None:  # else one without a name
                file.pending.append(entry)
                file.last_write = entry.offset if entry.call == "write" else min(file.last_write, entry.offset)

    def acknowledged(self, path: Path) -> bytes:
        """Of a file to which lines are appended, each synced: those before the last one, which may not be."""
        parent, name = self._place(str(path))
        file = parent.names().get(name)
        return b"" if file is None else file.content()[: file.last_write]

    def cut(self, rng: random.Random, target: Path) -> None:
        """Writes a state that a power cut may leave now into `target`."""
        for path, folder in self._folders.items():
            place = target / Path(path).relative_to(self._root)
            place.mkdir(parents=True, exist_ok=True)
            for name, file in folder.names(rng.randint(0, len(folder.changes))).items():
                (place / name).write_bytes(_applied(file.durable, list(_survivors(rng, file.pending))))

    def _rename(self, entry: Entry, parent: _Folder, name: str, file: _File | None) -> None:
        if entry.path in self._folders:  # with all below it
            for path in [p for p in self._folders if p == entry.path or p.startswith(f"{entry.path}/")]:
                self._folders[entry.to + path[len(entry.path) :]] = self._folders.pop(path)
        elif file is not None:
            there, new = self._place(entry.to)
            if there is parent:  # at once or not at all
                parent.changes.append({name: None, new: file})
            else:
                there.changes.append({new: file})
                parent.changes.append({name: None})

    def _place(self, path: str) -> tuple[_Folder, str]:
        parent, _, name = path.rpartition("/")
        if parent != self._root and not parent.startswith(f"{self._root}/"):  # the root's own, or renamed to outside
            return _Folder(), name
        return self._folders.setdefault(parent, _Folder()), name


def _survivors(rng: random.Random, pending: list[Entry]) -> Iterator[Entry]:
    """Some writes, whole or only their first bytes, with or without the size that they gave the file."""
    for entry in pending:
        fate = rng.choice(("kept", "lost", "torn", "zeros"))
        if fate == "kept" or entry.call == "truncate":
            yield entry
        elif fate != "lost":
            part = entry.data[: rng.randint(0, len(entry.data))]
            data = part.ljust(len(entry.data), b"\0") if fate == "zeros" else part
            yield Entry(entry.call, entry.path, entry.to, entry.offset, data)


def _applied(content: bytes, changes: list[Entry]) -> bytes:
    for change in changes:
        if change.call == "truncate":
            content = content[: change.offset].ljust(change.offset, b"\0")
        else:
            head = content[: change.offset].ljust(change.offset, b"\0")
            content = head + change.data + content[change.offset + len(change.data) :]
    return content
