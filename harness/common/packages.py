"""The one command that installs what is missing, for every error that names a missing package."""

from pathlib import Path


def install(*packages: str, pins: Path | None = None) -> str:
    """`pip install` of packages, at the versions of the file `pins`, or of constraints.txt where a checkout has one."""
    pins = pins or (Path("constraints.txt") if Path("constraints.txt").is_file() else None)
    quoted = " ".join(f"'{package}'" if "[" in package else package for package in packages)
    return f"pip install {quoted}" + (f" -c {pins}" if pins else "")


def install_extra(extra: str) -> str:
    """`pip install` of this project's extra."""
    return install(f"offload-harness[{extra}]")
