"""Bad inputs by the hundred against the real command line: `python -m tests.barrage`, see docs/developer/testing.md."""
