"""One engine a file: what the offload engine is compared with, and the fake engine that drives tests."""
