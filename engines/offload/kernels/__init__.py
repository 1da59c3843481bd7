"""The engine's kernels: per operation one interface, a reference in torch, implementations in C++ and Triton."""

from engines.offload.kernels.attention import (
    AttentionKernel,
    AttentionMetadata,
    AttentionSpec,
)
from engines.offload.kernels.build import NoCompilerError
from engines.offload.kernels.gemm import Gemm
from engines.offload.kernels.hadamard import Hadamard
from engines.offload.kernels.kernel_sets import DeviceKernels, HostKernels, KernelSet
from engines.offload.kernels.merge import RowMerger
from engines.offload.kernels.quantizer import Pack, Quantizer, WeightPack, stored_view

__all__ = [
    "AttentionKernel",
    "AttentionMetadata",
    "AttentionSpec",
    "DeviceKernels",
    "Gemm",
    "Hadamard",
    "HostKernels",
    "KernelSet",
    "NoCompilerError",
    "Pack",
    "Quantizer",
    "RowMerger",
    "WeightPack",
    "stored_view",
]
