"""What a file holds, as a hash that is remembered, so that a checkpoint is read for it once."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from collections.abc import Callable
from pathlib import Path

_PIECE = 4 << 20


def digest(file: Path, cache: Path, on_bytes: Callable[[int], None] = lambda count: None) -> str:
    """SHA-256 of a file, remembered in `cache` for as long as its inode, size and time of change stay.

    `on_bytes` is told of what has been read, piece by piece, or at once of what is known.
    """
    memo = cache / "contents.json"
    status = file.stat()
    key = f"{status.st_dev}:{status.st_ino}:{status.st_size}:{status.st_mtime_ns}"
    known: dict[str, str] = {}
    with contextlib.suppress(OSError, ValueError, TypeError):
        known = dict(json.loads(memo.read_text()))
    if key not in known:
        sha = hashlib.sha256()
        with file.open("rb", buffering=0) as source:
            while piece := source.read(_PIECE):
                sha.update(piece)
                on_bytes(len(piece))
                os.posix_fadvise(source.fileno(), 0, source.tell(), os.POSIX_FADV_DONTNEED)
        known[key] = sha.hexdigest()
        temporary = memo.with_suffix(f".new-{os.getpid()}")
        try:
            memo.parent.mkdir(parents=True, exist_ok=True)
            temporary.write_text(json.dumps(known))
            temporary.replace(memo)
        except OSError:  # it is only a memo: without it the next run hashes again
            with contextlib.suppress(OSError):
                temporary.unlink(missing_ok=True)
    else:
        on_bytes(status.st_size)
    return known[key]
