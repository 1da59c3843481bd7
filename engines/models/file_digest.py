"""What is derived from files' contents, such as their digests, and kept so that a checkpoint is read for it once."""

import hashlib
import json
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from harness.common.files import replace_with
from harness.common.regular_file import open_regular, read_json
from harness.common.system import drop_from_page_cache

_CHUNK_BYTES = 4 << 20


def digest(file: Path, cache: Path, on_bytes: Callable[[int], None] = lambda count: None) -> str:
    """SHA-256 of a file (64 hex digits), cached in `cache` while its inode, size and modification time stay the same.

    `on_bytes` gets the size of each chunk read, or the file's size at once for a cached digest.
    """
    read = False

    def hashed() -> str:
        nonlocal read
        read = True
        sha = hashlib.sha256()
        with open_regular(file) as source:
            while chunk := source.read(_CHUNK_BYTES):
                sha.update(chunk)
                on_bytes(len(chunk))
                drop_from_page_cache(source.fileno(), 0, source.tell())
        return sha.hexdigest()

    known = derived(file, "", cache, hashed)
    if not read:
        on_bytes(file.stat().st_size)
    return known


def derived(file: Path, name: str, cache: Path, derive: Callable[[], str]) -> str:
    """What `derive` makes of a file's content, kept in `cache` as `name` while its inode, size and modification time
    stay the same."""
    memo = cache / "contents.json"
    status = file.stat()
    key = f"{status.st_dev}:{status.st_ino}:{status.st_size}:{status.st_mtime_ns}{name and f':{name}'}"
    kept: dict[str, str] = {}
    with suppress(OSError, ValueError, TypeError):
        kept = dict(read_json(memo))
    if isinstance(kept.get(key), str):
        return kept[key]
    kept[key] = derive()
    with suppress(OSError):  # without it the next run only reads the file again
        replace_with(memo, json.dumps(kept))
    return kept[key]
