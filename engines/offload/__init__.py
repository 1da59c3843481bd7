"""Generation with models larger than memory: weights streamed from disk under the arithmetic they feed."""
