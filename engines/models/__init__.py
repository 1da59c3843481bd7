"""Checkpoints in every format, made ready on this machine; published shapes; dummy weights; tokenizers."""
