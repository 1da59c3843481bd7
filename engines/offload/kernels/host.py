"""The host's kernels: compiled where there is a C++ compiler, else their substitutes in numba and torch."""

from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from engines.offload.kernels.attention import AttentionKernel, compiled_attention
from engines.offload.kernels.build import NoCompilerError
from engines.offload.kernels.gemm import Gemm, compiled_gemm
from engines.offload.kernels.hadamard import Hadamard, compiled_hadamard, hadamard
from engines.offload.kernels.quantizer import (
    Quantizer,
    compiled_quantizer,
    numba_quantizer,
    plain_quantizer,
    reference_quantizer,
)
from engines.offload.kernels.reference_attention import reference_attention, reference_memory
from engines.offload.memory.host import attention_memory
from engines.offload.memory.storage import Plain, Storage
from harness.api import ModelShape

_Kernel = TypeVar("_Kernel")


class HostKernels:
    """Kernels on `threads` threads, built under `cache` on first use; see KernelSet."""

    def __init__(self, cache: Path, threads: int) -> None:
        self._cache = cache
        self._threads = threads
        self.note = ""

    def quantizer(self, stored: Storage) -> Quantizer:
        if isinstance(stored, Plain):
            return plain_quantizer(stored)
        if compiled := self._compiled(lambda: compiled_quantizer(stored, self._cache, self._threads)):
            return compiled
        try:
            return numba_quantizer(stored, self._threads)
        except ImportError:
            return reference_quantizer(stored)

    def gemm(self, stored: Storage) -> Gemm | None:
        """GEMM in float32 with weights as they are stored; None where it cannot be built."""
        return self._compiled(lambda: compiled_gemm(stored, self._cache, self._threads))

    def attention(self, stored: Storage, sparse: bool = False) -> AttentionKernel:
        """As KernelSet says; these kernels are the same, `sparse` or not."""
        compiled = self._compiled(lambda: compiled_attention(stored, self._cache, self._threads))
        return compiled or reference_attention(self.quantizer(stored))

    def attention_memory(
        self, stored: Storage, shape: ModelShape, longest: int, compute_bytes: int, sparse: bool
    ) -> tuple[int, int]:
        if self.note:
            return reference_memory(shape, longest, stored, compute_bytes, sparse)
        return attention_memory(shape, longest, self._threads)

    def hadamard(self) -> Hadamard:
        return self._compiled(lambda: compiled_hadamard(self._cache, self._threads)) or hadamard

    def _compiled(self, build: Callable[[], _Kernel]) -> _Kernel | None:
        """What `build` gives, or None where nothing can be built: after the first failure it is not tried again."""
        if self.note:
            return None
        try:
            return build()
        except NoCompilerError as exc:
            self.note = f"slower kernels, because the compiled ones are missing: {exc}"
            return None
