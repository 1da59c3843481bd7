"""Direct I/O, at most at a throttle's rate."""
