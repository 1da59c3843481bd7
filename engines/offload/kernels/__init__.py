"""The engine's kernels: per operation one interface, a reference in torch, implementations in C++ and Triton."""

from engines.offload.kernels.attention import AttentionKernel, AttentionMetadata, merge_attention_states, unmoved
from engines.offload.kernels.base import KernelSet
from engines.offload.kernels.build import NoCompilerError
from engines.offload.kernels.gemm import Gemm
from engines.offload.kernels.hadamard import Hadamard
from engines.offload.kernels.host import HostKernels
from engines.offload.kernels.quantizer import Quantizer, stored_view

__all__ = [
    "AttentionKernel",
    "AttentionMetadata",
    "Gemm",
    "Hadamard",
    "HostKernels",
    "KernelSet",
    "NoCompilerError",
    "Quantizer",
    "merge_attention_states",
    "stored_view",
    "unmoved",
]
