"""One engine a file: the rivals that the offload engine is compared with, and the fake engine that drives tests."""
