"""Kernels that torch has not: in C++, built once with the host's compiler, with a torch reference in their place."""

from engines.offload.kernels.attention import (
    AttentionKernel,
    Segments,
    compiled_attention,
    compiled_memory,
    reference_attention,
    reference_memory,
)
from engines.offload.kernels.build import NoCompilerError
from engines.offload.kernels.product import Product, compiled_product

__all__ = [
    "AttentionKernel",
    "NoCompilerError",
    "Product",
    "Segments",
    "compiled_attention",
    "compiled_memory",
    "compiled_product",
    "reference_attention",
    "reference_memory",
]
