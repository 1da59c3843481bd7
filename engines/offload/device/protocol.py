"""What the engine needs of whatever computes: torch's operations aside, uploads, work beside other work, times.

host.py implements it for the CPU, cuda.py for a CUDA device; tests put a device of their own in place.
"""

from collections.abc import Callable, Sequence
from typing import Protocol

import torch

from engines.offload.timeline import Clock


class Event(Protocol):
    """A point in a stream of work."""

    def synchronize(self) -> None:
        """Blocks until the work before it is done; other work goes on."""


class Device(Protocol):
    """Where a model computes."""

    where: torch.device

    def upload(self, tensor: torch.Tensor) -> torch.Tensor:
        """A small host tensor where the model computes, in this thread's stream; does not block."""

    def download(self, tensor: torch.Tensor) -> torch.Tensor:
        """A tensor in host memory; blocks until it has been computed and copied, but not for other streams."""

    def run_async(self, work: Callable[[], None]) -> Event:
        """Runs `work` beside what this thread does next, after all that this thread has asked for before.

        The operands of `work` must be held until this thread waits for the event.
        """

    def wait_event(self, event: Event) -> None:
        """What this thread asks for from now on runs after `event`."""

    def record_stream(self, tensor: torch.Tensor) -> torch.Tensor:
        """Marks a tensor made in another stream as used by this thread's stream; returns it."""

    def memory(self) -> dict[str, float]:
        """Peaks in bytes by metric name: tensors, the allocator, pinned host memory. Empty for the host."""

    def close(self) -> None:
        """Ends threads and returns unused memory to the system. Idempotent."""


class Accelerator(Device, Clock, Protocol):
    """A device with memory and a clock of its own. A thread's work goes to its compute stream, copies go to streams of
    their own.

    `partition` says how the stream of `run_async` is set apart, empty where it is not. `context_bytes`: what the device
    holds for this process outside the allocator.
    """

    partition: str
    context_bytes: int

    def pinned(self, nbytes: int) -> torch.Tensor:
        """Page-locked host memory uint8 [nbytes], for copies that need no CPU; `nbytes` is a power of two."""

    def copy(
        self, pairs: Sequence[tuple[torch.Tensor, torch.Tensor]], after: Sequence[Event] = (), kv: bool = False
    ) -> Event:
        """Starts copies (to, from) between pinned memory and the device, all in one direction, once `after` are
        reached.

        Downloads have one stream and uploads two: KV blocks (`kv`) must not queue behind weight tiles that wait for a
        slot.
        """

    def timed_copy(self, to: torch.Tensor, source: torch.Tensor, after: Sequence[Event] = ()) -> tuple[Event, Event]:
        """As `copy`, of one weight tile to the device: when it begins and ends, as events that are stamps too."""

    def mark(self) -> Event:
        """After everything that this thread has asked the device to compute."""

    def fetch(self, *tensors: torch.Tensor) -> tuple[list[torch.Tensor], Event]:
        """Tensors in host memory, and when all will be there; does not block."""
