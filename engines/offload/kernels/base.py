"""The kernels that a backend computes with."""

from __future__ import annotations

from typing import Protocol

from engines.offload.kernels.attention import AttentionKernel
from engines.offload.kernels.hadamard import Hadamard
from engines.offload.kernels.quantizer import Quantizer
from engines.offload.memory.storage import Storage
from harness.api import ModelShape


class KernelSet(Protocol):
    """Kernels of the host or of a device. `note` says what is missing and why."""

    note: str

    def quantizer(self, stored: Storage) -> Quantizer: ...

    def attention(self, stored: Storage, sparse: bool) -> AttentionKernel: ...

    def attention_memory(
        self, stored: Storage, shape: ModelShape, longest: int, compute_bytes: int, sparse: bool
    ) -> tuple[int, int]: ...

    def hadamard(self) -> Hadamard: ...
