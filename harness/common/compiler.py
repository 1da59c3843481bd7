"""Locates the host's C++ compiler, for kernels that are built on first use."""

import os
import shlex
import shutil

from harness.api import HarnessError


def compiler_command() -> list[str]:
    """The compiler's command line: $CXX with its arguments, else c++, g++ or clang++; empty where there is none.

    Raises HarnessError for a CXX that is no command line.
    """
    own = os.environ.get("CXX", "")
    try:
        words = shlex.split(own)
    except ValueError as exc:
        raise HarnessError(f"CXX is {own!r}, which is no command line ({exc}); set it again or unset it") from None
    return words or [*filter(None, map(shutil.which, ("c++", "g++", "clang++")))][:1]
