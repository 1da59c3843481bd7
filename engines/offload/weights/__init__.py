"""Weight tiles: converted once, streamed through a ring, multiplied."""
