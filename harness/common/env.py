"""Environment variables that change how fast an engine computes."""

import re

#: Prefixes of the variables that OpenMP, MKL, oneDNN, the allocator and engines read.
ENV_PREFIXES = ("OMP_", "GOMP_", "KMP_", "MKL_", "OPENBLAS_", "DNNL_", "ONEDNN_", "MALLOC_", "LD_PRELOAD", "TORCH_",
                "PYTORCH_", "DS_", "VLLM_", "GGML_")  # fmt: skip


def is_settable(name: str) -> bool:
    """Whether a cell may set the variable: it has one of these prefixes, and no letter that no name can have."""
    return name.startswith(ENV_PREFIXES) and re.fullmatch(r"\w+", name, re.ASCII) is not None
