"""What `harness plan`, `plan --explain` and `check-model` compute."""
