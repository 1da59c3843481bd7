"""The cache folder: what it holds, what may go, and whether it is whole."""
