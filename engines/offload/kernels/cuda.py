"""A device's kernels: Triton's where it is installed, else torch's operations."""

import importlib.util

from engines.offload.kernels.attention import AttentionKernel
from engines.offload.kernels.hadamard import Hadamard, hadamard
from engines.offload.kernels.quantizer import Quantizer, plain_quantizer, reference_quantizer
from engines.offload.kernels.reference_attention import reference_attention, reference_memory
from engines.offload.memory.storage import Plain, Storage
from harness.api import ModelShape


class DeviceKernels:
    """Kernels for tensors on a device, in Triton or not; None: if it is installed. See KernelSet.

    Its quantizers unpack to the dtype of their output.
    """

    def __init__(self, triton: bool | None = None) -> None:
        self._triton = importlib.util.find_spec("triton") is not None if triton is None else triton
        self.note = "" if self._triton else "slower kernels on the device: pip install triton"

    def quantizer(self, stored: Storage) -> Quantizer:
        if isinstance(stored, Plain):
            return plain_quantizer(stored)
        if not self._triton:
            return reference_quantizer(stored)
        from engines.offload.kernels.triton_quantizer import triton_quantizer  # Triton is optional

        return triton_quantizer(stored)

    def attention(self, stored: Storage, sparse: bool = False) -> AttentionKernel:
        if sparse or not self._triton:
            return reference_attention(self.quantizer(stored))
        from engines.offload.kernels.triton_attention import triton_attention  # Triton is optional

        return triton_attention(stored)

    def attention_memory(
        self, stored: Storage, shape: ModelShape, longest: int, compute_bytes: int, sparse: bool
    ) -> tuple[int, int]:
        if sparse or not self._triton:
            return reference_memory(shape, longest, stored, compute_bytes, sparse)
        return 0, 0

    def hadamard(self) -> Hadamard:
        return hadamard
