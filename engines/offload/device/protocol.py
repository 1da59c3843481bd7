"""What the engine asks of a device beside torch's operations: copies, events, pinned memory, streams, times.

cuda.py has CUDA's; a test can put a device of its own in place.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch


class Event(Protocol):
    """A place in a stream of a device's work."""

    def synchronize(self) -> None:
        """Returns when the device has come there; other work goes on."""
        ...


class Device(Protocol):
    """What the engine asks of a device. Work of a thread is in its compute stream, copies are in streams of their own.

    `partition`: how the stream of `beside` is set apart, in words.
    """

    where: torch.device
    partition: str

    def pinned(self, nbytes: int) -> torch.Tensor:
        """Host memory uint8 [nbytes] that the device copies from and to by itself; `nbytes` is a power of two."""
        ...

    def copy(
        self, pairs: Sequence[tuple[torch.Tensor, torch.Tensor]], after: Sequence[Event] = (), blocks: bool = False
    ) -> Event:
        """Begins copies (to, from) between pinned memory and the device, all one way, once `after` have come.

        What goes down has a stream, and what comes up two: what is of the cache, `blocks`, must not wait behind weights
        that wait for a slot.
        """
        ...

    def mark(self) -> Event:
        """After all that this thread has asked the device to compute."""
        ...

    def join(self, event: Event) -> None:
        """What this thread asks for from now on begins after `event`; does not wait."""
        ...

    def upload(self, tensor: torch.Tensor) -> torch.Tensor:
        """A small host tensor on the device, in this thread's stream; does not wait."""
        ...

    def fetch(self, tensor: torch.Tensor) -> tuple[torch.Tensor, Event]:
        """A tensor in host memory, and when it will be there; does not wait."""
        ...

    def download(self, tensor: torch.Tensor) -> torch.Tensor:
        """A tensor in host memory; waits until it has been computed and copied, not for other streams."""
        ...

    def beside(self) -> AbstractContextManager[None]:
        """What is asked for inside runs in a stream of its own, after all that this thread has asked for before.

        What it takes from there must be held until this thread has merge_attention_states it again.
        """
        ...

    def keep(self, tensor: torch.Tensor) -> torch.Tensor:
        """`tensor`, made in another stream, for use in this thread's."""
        ...

    def stamp(self) -> Any:
        """A point in time of this thread's stream, for `seconds`."""
        ...

    def seconds(self, stamps: Sequence[Any]) -> list[float]:
        """When the device came to each stamp, by `time.perf_counter`; waits for them."""
        ...

    def close(self) -> None:
        """Gives memory that nobody holds any more back to the system."""
        ...

    def memory(self) -> dict[str, float]:
        """Peaks in bytes: what tensors took, what the allocator held, what is pinned in host memory."""
        ...
