"""Pins of the environments that engines have of their own; `python -m engines.environments NAME` writes a list."""
