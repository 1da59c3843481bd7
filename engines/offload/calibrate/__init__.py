"""Measures the rates of this host, its device and the engine for hardware profiles."""
