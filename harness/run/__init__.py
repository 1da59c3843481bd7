"""Runs a suite: the plan of launches, their records, progress, tuning; and the worker inside the sandbox."""
