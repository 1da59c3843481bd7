"""Direct I/O, at most as fast as a throttle allows."""
