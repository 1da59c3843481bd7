"""The kernels of one processor, for any storage: the host's, and a device's."""

import importlib.util
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Protocol, TypeVar

import torch

from engines.offload.kernels import least_squares, panels
from engines.offload.kernels.attention import AttentionKernel, compiled_attention
from engines.offload.kernels.attention_scratch import attention_scratch
from engines.offload.kernels.build import NoCompilerError
from engines.offload.kernels.gemm import Gemm, compiled_gemm
from engines.offload.kernels.hadamard import Hadamard, compiled_hadamard, device_hadamard, hadamard
from engines.offload.kernels.layer_blocks import RowWriter, compiled_writer, torch_writer
from engines.offload.kernels.merge import RowMerger, merge_rows
from engines.offload.kernels.quantizer import (
    Quantizer,
    WeightPack,
    compiled_quantizer,
    compiled_weight_packer,
    exact12_pack,
    numba_quantizer,
    numba_weight_packer,
    panel_pack,
    plain_quantizer,
    reference_quantizer,
)
from engines.offload.kernels.reference_attention import reference_attention, reference_memory
from engines.offload.kernels.rms_norm import RMSNorm, compiled_rms_norm
from engines.offload.kernels.rotary import Rotary, compiled_rotary
from engines.offload.kernels.tile_pool import TilePool
from engines.offload.memory.storage import Grouped, Panels, Plain, Storage
from harness.api import DTYPE_BYTES, Dtype, ModelShape

_Kernel = TypeVar("_Kernel")


class KernelSet(Protocol):
    """The kernels of one processor, for any storage. `note` says which are missing and why, or is empty."""

    note: str

    def quantizer(self, stored: Storage) -> Quantizer:
        """Converts values to what is stored, and back."""

    def attention(self, stored: Storage, sparse: bool = False) -> AttentionKernel:
        """Attention over a KV cache that is `stored` so. `sparse`: specs may have value_topk < 1."""

    def attention_memory(
        self, stored: Storage, shape: ModelShape, longest: int, dtype: Dtype, sparse: bool
    ) -> tuple[int, int]:
        """Working memory of `attention`: bytes in all, and bytes per prompt row of a pass.

        For sequences of up to `longest` tokens, queries in `dtype`, and `sparse` as given there.
        """

    def hadamard(self) -> Hadamard:
        """Rotates keys and values before they are quantized."""

    def rms_norm(self) -> RMSNorm | None:
        """Norms rows in one call; None where there is no such kernel."""

    def rotary(self) -> Rotary | None:
        """Rotates queries and keys by their positions in one call; None where there is no such kernel."""


class HostKernels:
    """The host's, on `threads` threads: compiled under `cache` on first use, else substitutes in numba and torch."""

    def __init__(self, cache: Path, threads: int) -> None:
        self.cache = cache
        self.threads = threads
        self._pool: TilePool | None = None
        self.note = ""

    def quantizer(self, stored: Storage) -> Quantizer:
        if isinstance(stored, Plain):
            return plain_quantizer(stored)
        if compiled := self._compiled(lambda: compiled_quantizer(stored, self.cache, self.threads)):
            return compiled
        try:
            return numba_quantizer(stored, self.threads)
        except ImportError:
            return reference_quantizer(stored)

    def weight_packer(self, stored: Grouped | Panels) -> WeightPack:
        """Packs weights at conversion: slower than the quantizer's `pack`, with a smaller error."""
        if isinstance(stored, Panels) and stored.exact12:
            return exact12_pack(self.cache)
        if isinstance(stored, Panels):
            return panel_pack(stored, None if stored.grouped is None else self.weight_packer(stored.grouped))
        if compiled := self._compiled(lambda: compiled_weight_packer(stored, self.cache, self.threads)):
            return compiled
        try:
            return numba_weight_packer(stored, self.threads)
        except ImportError:
            return partial(least_squares.pack, stored=stored)

    def gemm(self, stored: Storage) -> Gemm | None:
        """GEMM in float32 with weights as they are stored; None where it cannot be built."""
        return self._compiled(lambda: compiled_gemm(stored, self.cache, self.threads))

    def tile_pool(self) -> TilePool | None:
        """Threads that multiply weights in panels, one pool for all; None where it cannot be built."""
        self._pool = self._pool or self._compiled(lambda: TilePool(self.cache, self.threads))
        return self._pool

    def close(self) -> None:
        """Ends the threads of the tile pool. Idempotent."""
        if self._pool is not None:
            self._pool.close()

    def attention(self, stored: Storage, sparse: bool = False) -> AttentionKernel:
        """As KernelSet says; these kernels are the same, `sparse` or not."""
        compiled = self._compiled(lambda: compiled_attention(stored, self.cache, self.threads))
        return compiled or reference_attention(self.quantizer(stored))

    def attention_memory(
        self, stored: Storage, shape: ModelShape, longest: int, dtype: Dtype, sparse: bool
    ) -> tuple[int, int]:
        counted = self._compiled(
            lambda: attention_scratch(stored, self.cache, shape, longest, dtype, self.threads, sparse)
        )
        if counted is None:
            return reference_memory(shape, longest, stored, DTYPE_BYTES[dtype], sparse)
        return counted[0], 0

    def hadamard(self) -> Hadamard:
        return self._compiled(lambda: compiled_hadamard(self.cache, self.threads)) or hadamard

    def rms_norm(self) -> RMSNorm | None:
        return self._compiled(lambda: compiled_rms_norm(self.cache))

    def rotary(self) -> Rotary | None:
        return self._compiled(lambda: compiled_rotary(self.cache))

    def row_writer(self) -> RowWriter:
        """Writes new keys and values into KV blocks."""
        return self._compiled(lambda: compiled_writer(self.cache)) or torch_writer

    def _compiled(self, build: Callable[[], _Kernel]) -> _Kernel | None:
        """What `build` gives, or None where nothing can be built: after the first failure it is not tried again."""
        if self.note:
            return None
        try:
            return build()
        except NoCompilerError as exc:
            self.note = f"slower kernels, because the compiled ones are missing: {exc}"
            return None


class DeviceKernels:
    """A device's: Triton's or torch's; `triton` None: Triton's if it is installed.

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
        from engines.offload.kernels.triton_quantizer import pack, unpack  # Triton is optional

        return Quantizer(partial(pack, stored=stored), partial(unpack, stored=stored))

    def panels(self, stored: Panels, pack: WeightPack) -> Quantizer:
        """Of bfloat16 weights in panels, which the host's `pack` makes; unpacks them to rows."""

        def packed(x: torch.Tensor) -> torch.Tensor:
            found = pack(x.cpu())
            assert found is not None, "values that are alike"
            return found.to(x.device)

        if stored.exact12 and self._triton:
            from engines.offload.kernels.triton_panels import unpack12  # Triton is optional

            return Quantizer(packed, unpack12)
        unpack = panels.unpack12 if stored.exact12 else panels.unpack
        return Quantizer(packed, partial(_unpack_rows, unpack=unpack))

    def attention(self, stored: Storage, sparse: bool = False) -> AttentionKernel:
        if sparse or not self._triton:
            return reference_attention(self.quantizer(stored))
        from engines.offload.kernels.triton_attention import triton_attention  # Triton is optional

        return triton_attention(stored)

    def row_merger(self) -> RowMerger:
        """Merges host attention into the device's."""
        if not self._triton:
            return merge_rows
        from engines.offload.kernels.triton_attention import triton_merge_rows  # Triton is optional

        return triton_merge_rows

    def attention_memory(
        self, stored: Storage, shape: ModelShape, longest: int, dtype: Dtype, sparse: bool
    ) -> tuple[int, int]:
        if sparse or not self._triton:
            return reference_memory(shape, longest, stored, DTYPE_BYTES[dtype], sparse)
        return 0, 0

    def hadamard(self) -> Hadamard:
        return device_hadamard()

    def rms_norm(self) -> RMSNorm | None:
        return None

    def rotary(self) -> Rotary | None:
        return None


def _unpack_rows(
    stored: torch.Tensor, out: torch.Tensor, unpack: Callable[[torch.Tensor, int, int], torch.Tensor]
) -> None:
    rows, columns = out.shape
    out.copy_(unpack(stored, rows, columns))
