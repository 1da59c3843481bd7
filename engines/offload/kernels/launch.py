"""Calls of kernels that torch knows nothing of, so that whoever captures a pass learns of them."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from contextvars import ContextVar
from typing import Protocol

import torch

#: Binds a kernel call to tensors where they lie now; the result makes that call each time it is called.
Bind = Callable[..., Callable[[], object]]


class Capture(Protocol):
    """What takes down the operations of a pass while it runs."""

    def paused(self) -> AbstractContextManager[None]:
        """Torch's operations are not taken down meanwhile: another thread of control may run."""

    def launched(self, bind: Bind, *tensors: torch.Tensor, created: int = 0) -> None:
        """A call was made, of which the last `created` tensors are new, and not torch's own."""


#: Of the pass that runs; None where nobody captures it.
capture: ContextVar[Capture | None] = ContextVar("capture", default=None)


def launch(bind: Bind, *tensors: torch.Tensor) -> None:
    """Calls a kernel with the values that its tensors have now."""
    bind(*tensors)()
    if (captured := capture.get()) is not None:
        captured.launched(bind, *tensors)
