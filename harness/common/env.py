"""Environment variables that change how fast an engine computes."""

#: Prefixes of the variables that OpenMP, MKL, oneDNN, the allocator and engines read.
ENV_PREFIXES = ("OMP_", "GOMP_", "KMP_", "MKL_", "OPENBLAS_", "DNNL_", "ONEDNN_", "MALLOC_", "LD_PRELOAD", "TORCH_",
                "PYTORCH_", "DS_", "VLLM_", "GGML_")  # fmt: skip
