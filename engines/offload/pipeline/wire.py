"""Hidden states as bytes on the way from stage to stage."""

from dataclasses import dataclass
from typing import Protocol

import torch


class Wire(Protocol):
    """How hidden states [rows, width] in host memory travel."""

    def nbytes(self, rows: int, width: int) -> int:
        """Bytes of so many."""

    def packed(self, hidden: torch.Tensor) -> torch.Tensor:
        """uint8 [nbytes]."""

    def unpacked(self, raw: torch.Tensor, rows: int, width: int) -> torch.Tensor:
        """[rows, width] of what `packed` made."""


@dataclass(frozen=True)
class PlainWire(Wire):
    """The values as they are, in `dtype`."""

    dtype: torch.dtype

    def nbytes(self, rows: int, width: int) -> int:
        return rows * width * self.dtype.itemsize

    def packed(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden.contiguous().view(torch.uint8).flatten()

    def unpacked(self, raw: torch.Tensor, rows: int, width: int) -> torch.Tensor:
        return raw.view(self.dtype).view(rows, width)
