"""The paged KV cache: which block is whose, where blocks live, and attention over them."""
