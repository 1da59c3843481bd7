"""What `harness plan` and its `--explain` compute."""
