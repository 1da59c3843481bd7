"""Hidden states as bytes on the way from stage to stage: in the dtype that is computed in, or in eight bits."""

from dataclasses import dataclass
from typing import Protocol

import torch

from engines.offload.pipeline.cut import GROUP, int8_bytes
from harness.api import OffloadPolicy

#: The largest code.
_MOST = 127


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


@dataclass(frozen=True)
class Int8Wire(Wire):
    """Codes of -127 to 127 in groups of GROUP values of a row, each with a float32 scale; `dtype` is computed in.

    A value is off by half a scale at most, which is its group's largest magnitude / 254, and by its rounding to
    `dtype`.
    """

    dtype: torch.dtype

    def nbytes(self, rows: int, width: int) -> int:
        return rows * int8_bytes(width)

    def packed(self, hidden: torch.Tensor) -> torch.Tensor:
        rows, width = hidden.shape
        padding = _groups(width) * GROUP - width
        groups = torch.nn.functional.pad(hidden.float(), (0, padding)).reshape(rows, -1, GROUP)
        scales = groups.abs().amax(dim=-1, keepdim=True) / _MOST
        codes = (groups / torch.where(scales > 0, scales, 1.0)).round_()
        codes = codes.clamp_(-_MOST, _MOST).to(torch.int8).view(rows, -1)[:, :width]  # a scale may be subnormal
        return torch.cat([scales.view(torch.uint8).flatten(), codes.contiguous().view(torch.uint8).flatten()])

    def unpacked(self, raw: torch.Tensor, rows: int, width: int) -> torch.Tensor:
        groups = _groups(width)
        scales = raw[: 4 * rows * groups].view(torch.float32).view(rows, groups)
        codes = raw[4 * rows * groups :].view(torch.int8).view(rows, width)
        return (codes * scales.repeat_interleave(GROUP, dim=1)[:, :width]).to(self.dtype)


def wire_of(policy: OffloadPolicy, dtype: torch.dtype) -> Wire:
    """How hidden states of `dtype` travel under a policy."""
    return PlainWire(dtype) if policy.wire_bits is None else Int8Wire(dtype)


def _groups(width: int) -> int:
    return -(-width // GROUP)
