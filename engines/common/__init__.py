"""What every engine shares: request checks, sampling, folders built once, the CUDA device."""
