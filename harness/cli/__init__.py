"""The `harness` command, one module a command."""
