"""What every engine shares: request checks, sampling, folders built once, the compiler, the CUDA device."""
