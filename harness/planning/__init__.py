"""What `harness plan`, `--explain` and `check-model` take and print."""
