"""What can be found where a file is expected: things that are no files, and files of anything."""

import os
import random
import re
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path

_NUMBER = re.compile(rb"([:,\[] ?)\d+(?:\.\d+)?")
_DEEP = 100_000


def _unreadable(path: Path) -> None:
    path.write_bytes(b"secret")
    path.chmod(0)


#: Puts something at a path that no command may read as a file, or write to; for root everything is readable.
SPECIAL: Mapping[str, Callable[[Path], object]] = {
    "folder": lambda path: path.mkdir(),
    "fifo": os.mkfifo,
    "zero": lambda path: path.symlink_to("/dev/zero"),
    "full": lambda path: path.symlink_to("/dev/full"),
    "dangling": lambda path: path.symlink_to("nowhere"),
    "loop": lambda path: path.symlink_to(path.name),
    **({"unreadable": _unreadable} if os.geteuid() else {}),
}
#: Contents that are good in no format of ours, made of a good one.
GARBAGE: Mapping[str, Callable[[bytes], bytes]] = {
    "nuls": lambda good: bytes(4096),
    "invalid-utf8": lambda good: b"\xff\xfe\x80" + good,
    "noise": lambda good: random.Random(0).randbytes(4096),
    "utf-16": lambda good: good.decode(errors="replace").encode("utf-16"),
}
#: Contents that are damaged or unusual; whether they are refused depends on the format.
DAMAGED: Mapping[str, Callable[[bytes], bytes]] = {
    "empty": lambda good: b"",
    "bom": lambda good: b"\xef\xbb\xbf" + good,
    "crlf": lambda good: good.replace(b"\n", b"\r\n"),
    "10-mb-line": lambda good: good + b'{"a": "' + b"x" * 10_000_000 + b'"}\n',
    "nested-lists": lambda good: b"[" * _DEEP + b"\n",
    "nested-objects": lambda good: b'{"a":' * _DEEP + b"\n",
    "closed-lists": lambda good: b"[" * _DEEP + b"]" * _DEEP + b"\n",
    "nan": lambda good: _NUMBER.sub(rb"\1NaN", good, count=1),
    "infinity": lambda good: _NUMBER.sub(rb"\1Infinity", good, count=1),
    "1e999": lambda good: _NUMBER.sub(rb"\g<1>1e999", good, count=1),
    "duplicate-keys": lambda good: b'{"a": 1, "a": 2}\n',
    "list": lambda good: b"[1, 2]\n",
    "number": lambda good: b"5\n",
    "text": lambda good: b'"text"\n',
    "null": lambda good: b"null\n",
    "truncated": lambda good: good[: 2 * len(good) // 3],
    "torn": lambda good: good + good[: len(good) // 2],
}
_SPARSE_BYTES = 3 << 30


def clear(path: Path) -> None:
    """Makes place for something else at `path`, and a folder around it."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    path.unlink(missing_ok=True)
    path.parent.mkdir(parents=True, exist_ok=True)


def put(path: Path, content: bytes) -> None:
    """A file with this content in place of what is at `path`."""
    clear(path)
    path.write_bytes(content)


def put_special(path: Path, name: str) -> None:
    """One of SPECIAL in place of what is at `path`."""
    clear(path)
    SPECIAL[name](path)


def put_sparse(path: Path) -> None:
    """A file of 3 GB that takes no space in place of what is at `path`."""
    put(path, b"")
    os.truncate(path, _SPARSE_BYTES)
