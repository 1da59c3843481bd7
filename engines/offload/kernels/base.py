"""What a backend asks of its kernels, on the host or on a device."""

from typing import Protocol

from engines.offload.kernels.attention import AttentionKernel
from engines.offload.kernels.gemm import Gemm
from engines.offload.kernels.hadamard import Hadamard
from engines.offload.kernels.quantizer import Quantizer
from engines.offload.memory.storage import Storage
from harness.api import ModelShape


class KernelSet(Protocol):
    """The kernels of one processor, for any storage. `note` says which are missing and why, or is empty."""

    note: str

    def quantizer(self, stored: Storage) -> Quantizer:
        """Converts values to what is stored, and back."""

    def gemm(self, stored: Storage) -> Gemm | None:
        """GEMM in float32 with weights as they are stored; None where no kernel can do without dequantizing first."""

    def attention(self, stored: Storage, sparse: bool = False) -> AttentionKernel:
        """Attention over a KV cache that is `stored` so. `sparse`: specs may have value_topk < 1."""

    def attention_memory(
        self, stored: Storage, shape: ModelShape, longest: int, compute_bytes: int, sparse: bool
    ) -> tuple[int, int]:
        """Working memory of `attention`, which was asked for before: bytes in all, and bytes per prompt row of a pass.

        For sequences of up to `longest` tokens, queries of `compute_bytes` a value, and `sparse` as given there.
        """

    def hadamard(self) -> Hadamard:
        """Rotates keys and values before they are quantized."""
