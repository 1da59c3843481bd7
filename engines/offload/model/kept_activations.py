"""Where activations are kept between layers: in host memory and on disk below a device, or on disk below a host."""

import mmap
import time
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch

from engines.offload.device.protocol import Accelerator, Event
from engines.offload.disk.direct_file import DiskFile
from engines.offload.disk.throttle import Throttle
from engines.offload.memory.layout import aligned
from engines.offload.timeline import Timeline
from harness.common.buffers import direct_buffer


class Activations(Protocol):
    """Where rows are kept between layers. `direct`: by direct I/O, if on disk."""

    direct: bool

    def write(self, rows: torch.Tensor) -> Any:
        """Keeps rows [rows, width]; returns what `read` takes, once."""

    def read(self, kept: Any) -> torch.Tensor:
        """The rows again."""

    def reset(self) -> None:
        """Drops what a pass that failed has written."""

    def close(self) -> None:
        """Frees the disk space. Idempotent."""


class _Slots:
    """A file with a slot for each of `batches` batches of `rows` rows of `row_bytes` bytes, and a buffer for one."""

    def __init__(
        self, batches: int, rows: int, row_bytes: int, folder: Path, timeline: Timeline, throttle: Throttle
    ) -> None:
        self._slot_bytes = aligned(rows * row_bytes)
        self._batches = batches
        self._timeline = timeline
        self._file = DiskFile(folder, batches * self._slot_bytes, "activations", throttle)
        self.direct = self._file.direct
        self.close = self._file.close
        self._memory = memoryview(direct_buffer(max(self._slot_bytes, mmap.PAGESIZE)))
        self.reset()

    def reset(self) -> None:
        self._free = list(range(self._batches))

    def take(self) -> int:
        return self._free.pop()

    def give_back(self, slot: int) -> None:
        self._free.append(slot)

    def write(self, slot: int, rows: torch.Tensor) -> None:
        """Rows [rows, width] in host memory."""
        data = rows.contiguous().view(torch.uint8).numpy().reshape(-1)
        self._memory[: len(data)] = data.tobytes()
        self._move("write", slot, len(data))

    def read(self, slot: int, rows: torch.Tensor) -> None:
        """The same rows into a tensor shaped as they were."""
        nbytes = rows.numel() * rows.itemsize
        self._move("read", slot, nbytes)
        rows.copy_(torch.frombuffer(self._memory, dtype=rows.dtype, count=rows.numel()).view(rows.shape))

    def _move(self, what: str, slot: int, nbytes: int) -> None:
        began = time.perf_counter()
        move = self._file.write if what == "write" else self._file.read
        move(self._memory[: aligned(nbytes)], slot * self._slot_bytes)
        self._timeline.add("activations", what, began, time.perf_counter())


@dataclass(frozen=True)
class _OnDisk:
    """A batch's activations: the first rows in a slot of the file, the others in memory."""

    slot: int
    on_disk: int
    in_memory: torch.Tensor


class DiskActivations(Activations):
    """The first `share` of a batch's rows on disk, where the host computes. Room is for `batches` batches of `rows`
    rows of `row_bytes` bytes."""

    def __init__(
        self, share: float, batches: int, rows: int, row_bytes: int, folder: Path, timeline: Timeline,
        throttle: Throttle,
    ) -> None:  # fmt: skip
        self._share = share
        self._slots = _Slots(batches, rows, row_bytes, folder, timeline, throttle)
        self.direct = self._slots.direct

    def reset(self) -> None:
        self._slots.reset()

    def close(self) -> None:
        self._slots.close()

    def write(self, rows: torch.Tensor) -> _OnDisk:
        count, slot = round(self._share * len(rows)), self._slots.take()
        if count:
            self._slots.write(slot, rows[:count])
        return _OnDisk(slot, count, rows[count:].clone())

    def read(self, kept: _OnDisk) -> torch.Tensor:
        rows = kept.in_memory.new_empty(kept.on_disk + len(kept.in_memory), kept.in_memory.shape[1])
        rows[kept.on_disk :] = kept.in_memory
        if kept.on_disk:
            self._slots.read(kept.slot, rows[: kept.on_disk])
        self._slots.give_back(kept.slot)
        return rows


@dataclass(frozen=True)
class _Lower:
    """A batch's activations: the first rows in a slot of the file, once they are `stored`, the next in pinned memory,
    once they have arrived there, and the others on the device; what there is of each."""

    shape: tuple[int, int]
    dtype: torch.dtype
    slot: int
    stored: Future[None] | None
    pinned: tuple[torch.Tensor, Event] | None
    on_device: torch.Tensor


class LowerActivations(Activations):
    """The first rows of a batch below a `device`: the share `disk` of them on disk, then the share `host` in pinned
    memory. Room is as in DiskActivations.

    Rows are enqueued to be copied down, and up again when they are asked for; a thread writes to disk those that have
    arrived. So the host waits for the disk only.
    """

    def __init__(
        self, host: float, disk: float, device: Accelerator, batches: int, rows: int, row_bytes: int, folder: Path,
        timeline: Timeline, throttle: Throttle,
    ) -> None:  # fmt: skip
        self._host, self._disk = host, disk
        self._device = device
        self._slots = _Slots(batches, rows, row_bytes, folder, timeline, throttle) if disk else None
        self.direct = self._slots is None or self._slots.direct
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="activations")

    def write(self, rows: torch.Tensor) -> _Lower:
        on_disk = round(self._disk * len(rows))
        below = max(on_disk, round((self._host + self._disk) * len(rows)))
        slot, stored, pinned = -1, None, None
        if on_disk:
            slot, stored = self._store(rows[:on_disk])
        if below > on_disk:
            [host_rows], event = self._device.fetch(rows[on_disk:below])
            pinned = host_rows, event
        shape = (on_disk, rows.shape[1])
        return _Lower(shape, rows.dtype, slot, stored, pinned, rows[below:].clone())

    def read(self, kept: _Lower) -> torch.Tensor:
        parts = [kept.on_device]
        if kept.pinned is not None:
            pinned, fetched = kept.pinned
            rows = kept.on_device.new_empty(pinned.shape)
            # after this thread's work too: the rows may take memory that it still uses
            copied = self._device.copy([(rows, pinned)], (fetched, self._device.mark()), kv=True)
            self._device.wait_event(copied)
            parts.insert(0, rows)
        if kept.stored is not None:
            parts.insert(0, self._device.upload(self._load(kept)))
        return torch.cat(parts) if len(parts) > 1 else kept.on_device

    def reset(self) -> None:
        self._thread.submit(lambda: None).result()
        if self._slots is not None:
            self._slots.reset()

    def close(self) -> None:
        self._thread.shutdown()
        if self._slots is not None:
            self._slots.close()

    def _store(self, rows: torch.Tensor) -> tuple[int, Future[None]]:
        slots = self._slots
        assert slots is not None
        slot, ([fetched], event) = slots.take(), self._device.fetch(rows)

        def store() -> None:
            event.synchronize()
            slots.write(slot, fetched)

        return slot, self._thread.submit(store)

    def _load(self, kept: _Lower) -> torch.Tensor:
        slots = self._slots
        assert slots is not None and kept.stored is not None

        @torch.inference_mode()
        def load() -> torch.Tensor:
            rows = torch.empty(kept.shape, dtype=kept.dtype)
            slots.read(kept.slot, rows)
            return rows

        kept.stored.result()  # which raises what writing did
        rows = self._thread.submit(load).result()
        slots.give_back(kept.slot)
        return rows
