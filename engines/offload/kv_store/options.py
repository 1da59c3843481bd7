"""The engine option `kv_store`: two budgets and a folder."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from harness.api import HarnessError
from harness.common.units import parse_size


@dataclass(frozen=True)
class KVStoreOptions:
    """Bytes of KV blocks to keep in host memory, and in files under `path` (None: none)."""

    host: int
    disk: int
    path: Path | None


def kv_store_options(option: Mapping[str, Any]) -> KVStoreOptions:
    """From `{host: 2GiB, disk: 50GiB, path: FOLDER}`; raises TypeError naming what is wrong."""
    if not isinstance(option, Mapping):
        raise TypeError("kv_store must be a mapping such as {host: 2GiB, disk: 50GiB, path: FOLDER}")
    if unknown := set(option) - {"host", "disk", "path"}:
        raise TypeError(f"kv_store has host, disk and path, not {', '.join(sorted(map(str, unknown)))}")
    host, disk = (_size(name, option.get(name, 0)) for name in ("host", "disk"))
    path = option.get("path")
    if not (path is None or (isinstance(path, str | Path) and str(path))):
        raise TypeError("kv_store.path must be a folder's name")
    if bool(disk) != (path is not None):
        raise TypeError("kv_store.disk and kv_store.path go together: how much, and where")
    if not host and not disk:
        raise TypeError("kv_store needs host or disk, with a size such as 2GiB")
    return KVStoreOptions(host, disk, None if path is None else Path(path).expanduser())


def _size(name: str, value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int | str):
        raise TypeError(f"kv_store.{name} must be a size such as 2GiB")
    try:
        size = parse_size(str(value)) if isinstance(value, str) else value
    except HarnessError as exc:
        raise TypeError(f"kv_store.{name}: {exc}") from exc
    if size < 0:
        raise TypeError(f"kv_store.{name} must not be negative")
    return size
