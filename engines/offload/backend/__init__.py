"""Where a model computes and keeps what it uses: on the host alone, or on a CUDA device with the host behind it."""
