"""Batch jobs: a file of requests answered in a file."""
