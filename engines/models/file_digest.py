"""Hashes files and caches the digests, so that a checkpoint is read for them once."""

import hashlib
import json
import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from harness.common.files import replace_with

_CHUNK_BYTES = 4 << 20


def digest(file: Path, cache: Path, on_bytes: Callable[[int], None] = lambda count: None) -> str:
    """SHA-256 of a file (64 hex digits), cached in `cache` while its inode, size and modification time stay the same.

    `on_bytes` gets the size of each chunk read, or the file's size at once for a cached digest.
    """
    memo = cache / "contents.json"
    status = file.stat()
    key = f"{status.st_dev}:{status.st_ino}:{status.st_size}:{status.st_mtime_ns}"
    digests: dict[str, str] = {}
    with suppress(OSError, ValueError, TypeError):
        digests = dict(json.loads(memo.read_text()))
    if key in digests:
        on_bytes(status.st_size)
        return digests[key]
    sha = hashlib.sha256()
    with file.open("rb", buffering=0) as source:
        while chunk := source.read(_CHUNK_BYTES):
            sha.update(chunk)
            on_bytes(len(chunk))
            os.posix_fadvise(source.fileno(), 0, source.tell(), os.POSIX_FADV_DONTNEED)
    digests[key] = sha.hexdigest()
    with suppress(OSError):  # without the cached digest the next run only hashes again
        replace_with(memo, json.dumps(digests))
    return digests[key]
