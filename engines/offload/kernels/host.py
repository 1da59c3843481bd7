"""The kernels of this host: compiled where there is a compiler, else what stands in for them."""

from __future__ import annotations

from pathlib import Path

from engines.offload.kernels.attention import (
    AttentionKernel,
    compiled_attention,
    reference_attention,
    reference_memory,
)
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
from engines.offload.memory.host import attention_memory
from engines.offload.memory.storage import Plain, Storage
from harness.api import ModelShape


class Kernels:
    """Kernels on `threads` threads, built under `cache` on first use. `note` says what is missing and why."""

    def __init__(self, cache: Path, threads: int) -> None:
        self._cache = cache
        self._threads = threads
        self.note = ""

    def quantizer(self, stored: Storage) -> Quantizer:
        """How values become what is stored, and back."""
        if isinstance(stored, Plain):
            return plain_quantizer(stored)
        if not self.note:
            try:
                return compiled_quantizer(stored, self._cache, self._threads)
            except NoCompilerError as exc:
                self._miss(exc)
        try:
            return numba_quantizer(stored, self._threads)
        except ImportError:
            return reference_quantizer(stored)

    def gemm(self, stored: Storage) -> Gemm | None:
        """Products in float32 with weights as they are stored, if there is a kernel."""
        if not self.note:
            try:
                return compiled_gemm(stored, self._cache, self._threads)
            except NoCompilerError as exc:
                self._miss(exc)
        return None

    def attention(self, stored: Storage, sparse: bool = False) -> AttentionKernel:
        """Attention over a cache that is `stored` so; both kernels also serve `sparse` values."""
        if not self.note:
            try:
                return compiled_attention(stored, self._cache, self._threads)
            except NoCompilerError as exc:
                self._miss(exc)
        return reference_attention(self.quantizer(stored))

    def attention_memory(
        self, stored: Storage, shape: ModelShape, longest: int, compute_bytes: int, sparse: bool
    ) -> tuple[int, int]:
        """Bytes that `attention`, asked for before, holds beside its operands: fixed, and for each prompt row.

        For sequences of up to `longest` tokens. `sparse`: rows take a part of the values only.
        """
        if self.note:
            return reference_memory(shape, longest, stored, compute_bytes, sparse)
        return attention_memory(shape, longest, self._threads)

    def hadamard(self) -> Hadamard:
        """What spreads large columns of keys and values."""
        if not self.note:
            try:
                return compiled_hadamard(self._cache, self._threads)
            except NoCompilerError as exc:
                self._miss(exc)
        return hadamard

    def _miss(self, exc: NoCompilerError) -> None:
        self.note = f"no kernels of our own, which are faster: {exc}"
