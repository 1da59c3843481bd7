"""The kernels of a device: Triton's where it is installed, else what torch has."""

from __future__ import annotations

import importlib.util

from engines.offload.kernels.attention import AttentionKernel, reference_attention, reference_memory
from engines.offload.kernels.hadamard import Hadamard, hadamard
from engines.offload.kernels.quantizer import Quantizer, plain_quantizer, reference_quantizer
from engines.offload.memory.storage import Plain, Storage
from harness.api import ModelShape


class DeviceKernels:
    """As kernels.Kernels, for tensors on a device, by Triton or not. `note` says what is missing and why."""

    def __init__(self, triton: bool | None = None) -> None:
        self._triton = importlib.util.find_spec("triton") is not None if triton is None else triton
        self.note = "" if self._triton else "no kernels of our own for the device, which are faster: pip install triton"

    def quantizer(self, stored: Storage) -> Quantizer:
        """How values become what is stored, and back: `unpack` gives them in the dtype of its output."""
        if isinstance(stored, Plain):
            return plain_quantizer(stored)
        if not self._triton:
            return reference_quantizer(stored)
        from engines.offload.kernels.triton_quantizer import triton_quantizer  # there may be no Triton

        return triton_quantizer(stored)

    def attention(self, stored: Storage, sparse: bool) -> AttentionKernel:
        """Attention over a cache that is `stored` so; `sparse`: rows take a part of the values only."""
        if sparse or not self._triton:
            return reference_attention(self.quantizer(stored))
        from engines.offload.kernels.triton_attention import triton_attention

        return triton_attention(stored)

    def attention_memory(
        self, stored: Storage, shape: ModelShape, longest: int, compute_bytes: int, sparse: bool
    ) -> tuple[int, int]:
        """Bytes that `attention` holds beside its operands: fixed, and for each prompt row; see Kernels."""
        if sparse or not self._triton:
            return reference_memory(shape, longest, stored, compute_bytes, sparse)
        return 0, 0

    def hadamard(self) -> Hadamard:
        """What spreads large columns of keys and values."""
        return hadamard
