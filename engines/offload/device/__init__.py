"""The device that computes: the protocol the engine needs, CUDA's implementation, pinned host memory."""
