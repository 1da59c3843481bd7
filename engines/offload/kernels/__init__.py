"""Kernels that torch has not: in C++, built once with the host's compiler, with a torch reference in their place."""

from engines.offload.kernels.build import NoCompilerError
from engines.offload.kernels.decode import DecodeKernel, compiled_decode, reference_decode
from engines.offload.kernels.product import Product, compiled_product

__all__ = ["DecodeKernel", "NoCompilerError", "Product", "compiled_decode", "compiled_product", "reference_decode"]
