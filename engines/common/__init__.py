"""What every engine shares: batches, sampling, folders built once, the CUDA device."""
