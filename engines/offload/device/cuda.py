"""The CUDA device: the one class that calls torch.cuda."""

import gc
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

import torch

from engines.common.cuda_device import context_bytes, device_budget
from engines.offload.device.protocol import Accelerator
from engines.offload.memory.layout import ALIGN
from harness.api import HardwareLimits, UnsupportedError, first_line


def opened(limits: HardwareLimits, attention_units: int | None = None) -> Accelerator | None:
    """The CUDA device, with its allocator capped at what `limits` leave after CUDA's own memory; None if they give no
    device memory. `attention_units`: the number of multiprocessors for attention that runs beside products.

    Raises UnsupportedError if there is no CUDA device, or it cannot be partitioned like that; InfeasibleError if the
    limit leaves next to nothing.
    """
    if device_budget(limits) is None:
        return None
    try:
        return Cuda(attention_units)
    except BaseException:
        torch.cuda.set_per_process_memory_fraction(1.0)
        raise


def attached() -> tuple[Accelerator, str, int] | None:
    """The CUDA device of this host, its name and its free bytes; None without a device."""
    if not torch.cuda.is_available():
        return None
    free, _ = torch.cuda.mem_get_info()
    return Cuda(), torch.cuda.get_device_name(), free


class Cuda:
    """The CUDA device of this process; see Accelerator. `partition` says how its multiprocessors are divided."""

    def __init__(self, attention_units: int | None = None) -> None:
        self.where = torch.device("cuda", torch.cuda.current_device())
        self._up, self._kv, self._down = (torch.cuda.Stream() for _ in range(3))
        self._side, self.partition, self._context = _side_stream(attention_units)
        self._local = threading.local()
        self._pinned = 0
        self._origin = torch.cuda.Event(enable_timing=True)
        self._origin.record()
        self._origin.synchronize()
        self._origin_s = time.perf_counter()
        torch.cuda.reset_peak_memory_stats()
        self.context_bytes = context_bytes()

    def close(self) -> None:
        """Returns unused pinned memory and device memory to the system."""
        gc.collect()  # what was loaded holds itself in circles
        with suppress(RuntimeError):  # of a device that is broken
            torch.cuda.synchronize()  # copies ahead of a pass may still be under way
        if (empty := getattr(torch._C, "_host_emptyCache", None)) is not None:
            empty()
        torch.cuda.empty_cache()
        torch.cuda.set_per_process_memory_fraction(1.0)

    def pinned(self, nbytes: int) -> torch.Tensor:
        assert nbytes & (nbytes - 1) == 0  # torch's pinned allocator would round it up
        try:
            buffer = torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)
        except RuntimeError as exc:  # CUDA says "out of memory" of the host's too
            if "out of memory" not in str(exc):
                raise
            raise MemoryError(
                f"no {nbytes >> 20} MiB of pinned host memory beside {self._pinned >> 20} MiB: {first_line(exc)}"
            ) from exc
        self._pinned += nbytes
        assert not buffer.data_ptr() % ALIGN  # direct disk reads need the alignment
        return buffer

    def copy(
        self, pairs: Sequence[tuple[torch.Tensor, torch.Tensor]], after: Sequence[Any] = (), kv: bool = False
    ) -> torch.cuda.Event:
        down = bool(pairs) and pairs[0][0].device.type == "cpu"
        stream = self._down if down else self._kv if kv else self._up
        for event in after:
            stream.wait_event(event)
        self._begin_copies(stream, pairs)
        return stream.record_event(torch.cuda.Event(blocking=True))

    def timed_copy(
        self, to: torch.Tensor, source: torch.Tensor, after: Sequence[Any] = ()
    ) -> tuple[torch.cuda.Event, torch.cuda.Event]:
        for event in after:
            self._up.wait_event(event)
        began, ended = (torch.cuda.Event(enable_timing=True, blocking=True) for _ in range(2))
        began.record(self._up)
        self._begin_copies(self._up, [(to, source)])
        ended.record(self._up)
        return began, ended

    def _begin_copies(self, stream: torch.cuda.Stream, pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> None:
        here = self._here
        torch.cuda.set_stream(stream)  # torch's context manager asks for the stream before it anew
        try:
            for to, source in pairs:
                to.copy_(source, non_blocking=True)
        finally:
            torch.cuda.set_stream(here)

    @property
    def _here(self) -> torch.cuda.Stream:
        """This thread's stream. Kept: torch makes an object of it at each call, and a pass has thousands."""
        if (stream := getattr(self._local, "stream", None)) is None:
            stream = self._local.stream = torch.cuda.current_stream()
        return stream

    def mark(self) -> torch.cuda.Event:
        return self._here.record_event(torch.cuda.Event(blocking=True))

    def wait_event(self, event: Any) -> None:
        self._here.wait_event(event)

    def upload(self, tensor: torch.Tensor) -> torch.Tensor:
        # torch keeps the pinned copy until the transfer has read it
        return tensor.contiguous().pin_memory().to(self.where, non_blocking=True)

    def fetch(self, *tensors: torch.Tensor) -> tuple[list[torch.Tensor], torch.cuda.Event]:
        sources = [tensor.contiguous() for tensor in tensors]
        fetched = [torch.empty(source.shape, dtype=source.dtype, pin_memory=True) for source in sources]
        event = self.copy(list(zip(fetched, sources, strict=True)), (self.mark(),))
        for source in sources:
            source.record_stream(self._down)
        return fetched, event

    def download(self, tensor: torch.Tensor) -> torch.Tensor:
        downloaded = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
        downloaded.copy_(tensor, non_blocking=True)
        self.mark().synchronize()
        return downloaded

    def run_async(self, work: Callable[[], None]) -> torch.cuda.Event:
        before, here = self.mark(), self._here
        with torch.cuda.stream(self._side):
            self._side.wait_event(before)
            self._local.stream = self._side
            try:
                work()
                return self.mark()
            finally:
                self._local.stream = here

    def record_stream(self, tensor: torch.Tensor) -> torch.Tensor:
        tensor.record_stream(self._here)
        return tensor

    def stamp(self) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)
        event.record(self._here)
        return event

    def seconds(self, stamps: Sequence[torch.cuda.Event]) -> list[float]:
        if not stamps:
            return []
        stamps[-1].synchronize()  # the caller has waited for the other streams
        first, last = stamps[0], stamps[-1]
        # CUDA's float32 milliseconds lose microseconds after hours: measure from the last origin and move it along
        began = self._origin_s + self._origin.elapsed_time(first) / 1e3
        times = [began + first.elapsed_time(stamp) / 1e3 for stamp in stamps]
        self._origin, self._origin_s = last, times[-1]
        return times

    def memory(self) -> dict[str, float]:
        return {
            "device_peak_bytes": float(torch.cuda.max_memory_allocated()),
            "device_reserved_bytes": float(torch.cuda.max_memory_reserved()),
            "pinned_bytes": float(self._pinned),  # without torch's buffers for uploads and downloads
        }


def _side_stream(units: int | None) -> tuple[torch.cuda.Stream, str, Any]:
    """The stream for attention beside products, a description, and the context that keeps the stream alive.

    The stream belongs to a green context with `units` multiprocessors, or has high priority if `units` is None. In
    either case products may use all multiprocessors: torch makes no context of the rest (NanoFlow, section 4.2,
    partitions both).
    """
    if units is None:
        return torch.cuda.Stream(priority=-1), "", None
    try:
        from torch.cuda.green_contexts import GreenContext

        context: Any = GreenContext.create(num_sms=units, device_id=torch.cuda.current_device())
        return context.Stream(), f"attention beside products is held to {units} multiprocessors", context
    except (ImportError, RuntimeError) as exc:
        raise UnsupportedError(f"options.attention_units: no green context of {units}: {first_line(exc)}") from exc
