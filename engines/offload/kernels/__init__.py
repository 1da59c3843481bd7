"""Kernels that torch has not: in C++, built once with the host's compiler, with a torch reference in their place."""

from engines.offload.kernels.decode import DecodeKernel, compiled_decode, reference_decode

__all__ = ["DecodeKernel", "compiled_decode", "reference_decode"]
