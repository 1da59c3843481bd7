"""Kernels that torch has not: in C++, built once with the host's compiler, with a reference in their place."""

from engines.offload.kernels.attention import AttentionKernel, Segments, joined, unmoved
from engines.offload.kernels.build import NoCompilerError
from engines.offload.kernels.codec import Codec, stored_view
from engines.offload.kernels.gemm import Product
from engines.offload.kernels.hadamard import Turn
from engines.offload.kernels.host import Kernels

__all__ = [
    "AttentionKernel",
    "Codec",
    "Kernels",
    "NoCompilerError",
    "Product",
    "Segments",
    "Turn",
    "joined",
    "stored_view",
    "unmoved",
]
