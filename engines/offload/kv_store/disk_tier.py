"""Blocks in a file of fixed-size slots, and a journal of what each slot holds, which survives a kill at any point.

A slot is written before the journal tells of it, and the journal's record has a checksum of the block and one of
itself. So a record that was half written is skipped, and a block that was is found out when it is read.
"""

import hashlib
import logging
import os
import struct
import zlib
from collections import OrderedDict
from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from pathlib import Path

from harness.api import HarnessError
from harness.common.files import replacing
from harness.common.locks import locked
from harness.common.regular_file import open_regular

_LOG = logging.getLogger(__name__)
#: Block hash, slot, checksum of the block; the checksum of these follows.
_RECORD = struct.Struct("<16sQ16s")
_RECORD_BYTES = _RECORD.size + 4
#: Of files that tell what somebody asked.
_PRIVATE = 0o600
#: A journal is rewritten when it has so many records beside those that count.
_STALE = 1024


class DiskTier:
    """At most `capacity` bytes of blocks of `block_bytes`, in the folder `path/key`; what another `key` stored is left
    alone.

    Holds a lock on `path` until `close`. Raises HarnessError where another engine holds it or the folder cannot be
    used. After a write that fails nothing is stored any more, and `problem` says why; reading goes on.
    """

    def __init__(self, path: Path, key: str, block_bytes: int, capacity: int) -> None:
        self.capacity = capacity // block_bytes
        self.problem = ""
        self.evictions = 0
        self._path = path
        self._block_bytes = block_bytes
        #: Slot and checksum by block hash, the least recently used first.
        self._entries: OrderedDict[bytes, tuple[int, bytes]] = OrderedDict()
        busy = f"kv_store: {path} is in use by another engine; give each its own path, or stop that one"
        with ExitStack() as stack:
            try:
                folder = path / key
                folder.mkdir(parents=True, exist_ok=True)
                stack.enter_context(locked(path / "lock", busy))
                open_regular(folder / "blocks", "ab", False, _PRIVATE).close()
                self._blocks = stack.enter_context(open_regular(folder / "blocks", "rb+", False)).fileno()
                self._journal_path = folder / "journal"
                self._replay()
                journal = open_regular(self._journal_path, "ab", False, _PRIVATE)
                self._journal = stack.enter_context(journal).fileno()
                if os.fstat(self._blocks).st_size > self.capacity * block_bytes:
                    os.truncate(self._blocks, self.capacity * block_bytes)
            except OSError as exc:
                raise HarnessError(f"kv_store: cannot use {exc.filename or path}: {exc.strerror or exc}") from exc
            self._open = stack.pop_all()

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, block_hash: bytes) -> bool:
        return block_hash in self._entries

    def touch(self, block_hash: bytes) -> bool:
        """Whether a block is stored; it becomes the most recently used."""
        if block_hash in self._entries:
            self._entries.move_to_end(block_hash)
        return block_hash in self._entries

    def put(self, block_hash: bytes, block: bytes | bytearray) -> bool:
        """Writes a block; returns whether it is stored now."""
        if self.problem or not self.capacity:
            return False
        if self.touch(block_hash):
            return True
        slot = self._free_slot()
        checksum = _checksum(block)
        try:
            _write(self._blocks, block, slot * self._block_bytes)
            _write(self._journal, _record(block_hash, slot, checksum), None)
        except OSError as exc:
            self.problem = f"kv_store: {self._path}: {exc.strerror}; nothing more is stored on disk"
            _LOG.warning("%s", self.problem)
            return False
        self._entries[block_hash] = (slot, checksum)
        return True

    def get(self, block_hash: bytes) -> bytearray | None:
        """A block, which becomes the most recently used; None, and forgotten, where what is there is not the block."""
        slot, checksum = self._entries[block_hash]
        block = bytearray(self._block_bytes)
        try:
            whole = os.preadv(self._blocks, [block], slot * self._block_bytes) == len(block)
        except OSError:
            whole = False
        if not whole or _checksum(block) != checksum:
            del self._entries[block_hash]
            self._spare.append(slot)
            return None
        self._entries.move_to_end(block_hash)
        return block

    def close(self) -> None:
        """Gives back the folder. Idempotent."""
        self._open.close()

    def _free_slot(self) -> int:
        if self._spare:
            return self._spare.pop()
        if self._next_slot < self.capacity:
            self._next_slot += 1
            return self._next_slot - 1
        _, (slot, _) = self._entries.popitem(last=False)
        self.evictions += 1
        return slot

    def _replay(self) -> None:
        """Reads the journal, later records first in right, and rewrites it where most of it no longer counts."""
        owners: dict[int, bytes] = {}
        count, partial = 0, False
        for record in self._records():
            if len(record) < _RECORD_BYTES:
                partial = True
                break
            count += 1
            fields = record[: _RECORD.size]
            if zlib.crc32(fields) != int.from_bytes(record[_RECORD.size :], "little"):
                continue
            block_hash, slot, checksum = _RECORD.unpack(fields)
            if slot >= self.capacity:
                continue
            if (before := owners.pop(slot, None)) is not None:
                del self._entries[before]
            if (moved := self._entries.pop(block_hash, None)) is not None:
                del owners[moved[0]]
            owners[slot] = block_hash
            self._entries[block_hash] = (slot, checksum)
        self._next_slot = max(owners, default=-1) + 1
        self._spare = [slot for slot in range(self._next_slot) if slot not in owners]
        if partial or count > len(self._entries) + _STALE:
            self._rewrite(_record(block_hash, *entry) for block_hash, entry in self._entries.items())

    def _records(self) -> Iterator[bytes]:
        """The journal's records; the last may be short."""
        if os.path.lexists(self._journal_path):
            with open_regular(self._journal_path, follow=False) as file:
                yield from iter(lambda: file.read(_RECORD_BYTES), b"")

    def _rewrite(self, records: Iterable[bytes]) -> None:
        with replacing(self._journal_path) as file:
            file.writelines(records)


def _record(block_hash: bytes, slot: int, checksum: bytes) -> bytes:
    fields = _RECORD.pack(block_hash, slot, checksum)
    return fields + zlib.crc32(fields).to_bytes(4, "little")


def _checksum(block: bytes | bytearray) -> bytes:
    return hashlib.blake2b(block, digest_size=16).digest()


def _write(descriptor: int, content: bytes | bytearray, offset: int | None) -> None:
    """Writes all of it, at `offset` or at the end of a file that is appended to."""
    left = memoryview(content)
    while left:
        done = os.write(descriptor, left) if offset is None else os.pwrite(descriptor, left, offset)
        left = left[done:]
        offset = None if offset is None else offset + done
