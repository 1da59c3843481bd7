"""`python -m harness`: the command where no package was installed, such as on a machine without a network."""

from harness.cli.main import main

if __name__ == "__main__":
    main()
