"""Measures the rates of this host, its device and the engine, for plans."""
