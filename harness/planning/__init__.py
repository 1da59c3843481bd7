"""What `harness plan` and `plan --explain` compute."""
