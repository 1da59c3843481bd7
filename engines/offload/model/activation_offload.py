"""Activations that leave memory between layers: a layer gives a stand-in, and the next one gets the real thing.

What is parked is the residual stream of a batch, from the end of a layer to the start of the next, while the other
batches of the pass finish that layer. On a host without a device this frees little, because the rows of all batches
meet again at the next product; it is what a policy with activations on disk asks for, and exact.
"""

from __future__ import annotations

import mmap
import time
from collections.abc import Callable, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from engines.offload.disk.direct_file import DiskFile
from engines.offload.disk.throttle import Throttle
from engines.offload.memory.layout import aligned
from engines.offload.timeline import Timeline
from harness.common.buffers import direct_buffer


@dataclass(frozen=True)
class _Parked:
    """Where a batch's activations are: the first rows in a slot of the file, the others in memory."""

    slot: int
    on_disk: int
    rest: torch.Tensor
    shape: torch.Size


#: What the batch in hand has parked; each batch runs in a greenlet, and so in a context, of its own.
_parked: ContextVar[_Parked] = ContextVar("parked")


class ActivationOffload:
    """Parks a part `share` of the rows that leave each of `layers` but the last, for at most `batches` batches of
    `rows` rows of `row_bytes`. `pause` is called once they are parked."""

    def __init__(
        self,
        layers: Sequence[nn.Module],
        share: float,
        batches: int,
        rows: int,
        row_bytes: int,
        folder: Path,
        timeline: Timeline,
        throttle: Throttle,
        pause: Callable[[], None],
    ) -> None:
        self._share = share
        self._slot_bytes = aligned(rows * row_bytes)
        self._batches = batches
        self._free = list(range(batches))
        self._timeline = timeline
        self._pause = pause
        self._file = DiskFile(folder, batches * self._slot_bytes, "activations", throttle)
        self.direct = self._file.direct
        self._memory = memoryview(direct_buffer(max(self._slot_bytes, mmap.PAGESIZE)))
        self.rows = self.rows_on_disk = 0
        self._hooks = [layer.register_forward_hook(self._leave) for layer in layers[:-1]]
        self._hooks += [layer.register_forward_pre_hook(self._enter, with_kwargs=True) for layer in layers[1:]]

    def close(self) -> None:
        """Takes the hooks off and gives the file's room back. Idempotent."""
        for hook in self._hooks:
            hook.remove()
        self._file.close()

    def forget(self) -> None:
        """What was parked by a pass that was broken off."""
        self._free = list(range(self._batches))

    def _leave(self, layer: nn.Module, args: Any, output: Any) -> Any:
        hidden = output[0] if isinstance(output, tuple) else output
        _parked.set(self._put(hidden))
        stand_in = torch.empty_like(hidden, device="meta")
        return (stand_in, *output[1:]) if isinstance(output, tuple) else stand_in

    def _enter(self, layer: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        self._pause()  # not before: a module holds what its hook is given until the hook returns
        hidden = self._get(_parked.get())
        if args:
            return (hidden, *args[1:]), kwargs
        return args, {**kwargs, "hidden_states": hidden}

    def _put(self, hidden: torch.Tensor) -> _Parked:
        rows = hidden[0]
        count = round(self._share * len(rows))
        self.rows += len(rows)
        self.rows_on_disk += count
        slot = self._free.pop()
        if count:
            data = rows[:count].contiguous().view(torch.uint8).numpy().reshape(-1)
            self._memory[: len(data)] = data.tobytes()
            self._move("write", slot, len(data))
        return _Parked(slot, count, rows[count:].clone(), hidden.shape)

    def _get(self, parked: _Parked) -> torch.Tensor:
        hidden = parked.rest.new_empty(parked.shape)
        hidden[0, parked.on_disk :] = parked.rest
        if parked.on_disk:
            nbytes = parked.on_disk * hidden.shape[2] * hidden.itemsize
            self._move("read", parked.slot, nbytes)
            data = torch.frombuffer(self._memory, dtype=hidden.dtype, count=nbytes // hidden.itemsize)
            hidden[0, : parked.on_disk] = data.view(parked.on_disk, -1)
        self._free.append(parked.slot)
        return hidden

    def _move(self, what: str, slot: int, nbytes: int) -> None:
        began = time.perf_counter()
        move = self._file.write if what == "write" else self._file.read
        move(self._memory[: aligned(nbytes)], slot * self._slot_bytes)
        self._timeline.add("activations", what, began, time.perf_counter())
