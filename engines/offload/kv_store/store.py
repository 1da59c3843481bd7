"""A store of KV blocks by content hash in two tiers: host memory, and from there to disk, by least recent use.

Source: NanoFlow (Zhu et al. 2025), section 4.4.
"""

import time
from collections import OrderedDict
from collections.abc import Callable, Sequence

from engines.offload.kv_store.disk_tier import DiskTier
from engines.offload.memory.kv_blocks import BLOCK_SIZE
from harness.api import KVStoreStats

#: The weight of the latest transfer in a tier's rate.
_LATEST = 0.2
#: How much better a tier that was not read is taken to be the next time: without a read it is not measured again.
_FORGET = 1.02


class KVStore:
    """Blocks of `block_bytes`: up to `host_bytes` of them in memory, and on `disk` those that had to leave it.

    `row_s`: seconds to compute one more token in a pass, None if not known. A block is only given back where that is
    faster, by the rates at which the tiers were read so far, than computing its tokens again.
    """

    def __init__(
        self, block_bytes: int, host_bytes: int, disk: DiskTier | None, row_s: Callable[[], float | None]
    ) -> None:
        self._block_bytes = block_bytes
        self._most = host_bytes // block_bytes
        self._disk = disk
        self._row_s = row_s
        self._host: OrderedDict[bytes, bytearray] = OrderedDict()  # the least recently used first
        self._tiers = ("host", "disk") if disk is not None else ("host",)
        self._rates: dict[str, float] = {}  # bytes/s, by tier
        self._hits = dict.fromkeys(self._tiers, 0)  # blocks
        self._read = dict.fromkeys(self._tiers, 0)
        self._written = dict.fromkeys(self._tiers, 0)
        self._evicted = 0  # from memory to nowhere
        self._recomputed = 0

    def __contains__(self, block_hash: bytes) -> bool:
        return self._tier_of(block_hash) is not None

    def touch(self, block_hash: bytes) -> bool:
        """Whether a block is stored; it becomes the most recently used."""
        if block_hash in self._host:
            self._host.move_to_end(block_hash)
            return True
        return self._disk is not None and self._disk.touch(block_hash)

    def put(self, block_hash: bytes, block: bytearray) -> None:
        """Stores a block; others may have to go."""
        self._put_host(block_hash, block)
        while len(self._host) > self._most:
            self._evict_host()

    def worth_reading(self, block_hashes: Sequence[bytes]) -> int:
        """How many of a prefix's next blocks are stored where reading them is faster than computing them."""
        row_s = self._row_s()
        for count, block_hash in enumerate(block_hashes):
            tier = self._tier_of(block_hash)
            if tier is None:
                return count
            if row_s is not None and self._block_bytes > self._rates.get(tier, float("inf")) * row_s * BLOCK_SIZE:
                self._rates[tier] *= _FORGET
                self._recomputed += BLOCK_SIZE * sum(self._tier_of(h) is not None for h in block_hashes[count:])
                return count
        return len(block_hashes)

    def get(self, block_hash: bytes, use: Callable[[bytearray], None]) -> bool:
        """Has `use` copy a stored block to where it is needed; False if it turns out to be damaged or is not there."""
        tier, began = self._tier_of(block_hash), time.perf_counter()
        if tier is None:
            return False
        if tier == "host":
            self._host.move_to_end(block_hash)
            block: bytearray | None = self._host[block_hash]
        else:
            assert self._disk is not None
            block = self._disk.get(block_hash)
        if block is None:
            return False
        use(block)
        rate = self._block_bytes / max(1e-9, time.perf_counter() - began)
        self._rates[tier] = self._rates.get(tier, rate) + _LATEST * (rate - self._rates.get(tier, rate))
        self._hits[tier] += 1
        self._read[tier] += self._block_bytes
        if tier == "disk" and self._most:
            self.put(block_hash, block)
        return True

    def stats(self) -> KVStoreStats:
        """Counts since the store was opened."""
        disk = self._disk
        evictions = {"host": self._evicted} | ({} if disk is None else {"disk": disk.evictions})
        return KVStoreStats(
            blocks={"host": len(self._host)} | ({} if disk is None else {"disk": len(disk)}),
            hit_tokens={tier: hits * BLOCK_SIZE for tier, hits in self._hits.items()},
            bytes_read=dict(self._read),
            bytes_written=dict(self._written),
            evictions=evictions,
            recomputed_tokens=self._recomputed,
            problem="" if disk is None else disk.problem,
        )

    def close(self) -> None:
        """Moves what is in memory to disk, as far as it fits there, and gives back the folder. Idempotent."""
        if self._disk is not None:
            for block_hash, block in self._host.items():
                self._put_disk(block_hash, block)
            self._disk.close()
        self._host.clear()
        self._disk = None

    def _tier_of(self, block_hash: bytes) -> str | None:
        if block_hash in self._host:
            return "host"
        return "disk" if self._disk is not None and block_hash in self._disk else None

    def _put_host(self, block_hash: bytes, block: bytearray) -> None:
        self._host[block_hash] = block
        self._host.move_to_end(block_hash)
        if self._most:
            self._written["host"] += len(block)

    def _evict_host(self) -> None:
        block_hash, block = self._host.popitem(last=False)
        if not self._put_disk(block_hash, block):
            self._evicted += 1

    def _put_disk(self, block_hash: bytes, block: bytearray) -> bool:
        if self._disk is None:
            return False
        new = block_hash not in self._disk
        stored = self._disk.put(block_hash, block)
        if stored and new:
            self._written["disk"] += len(block)
        return stored
