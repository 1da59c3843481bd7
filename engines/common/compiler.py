"""The C++ compiler of this host, for the kernels that are built on first use."""

from __future__ import annotations

import os
import shlex
import shutil


def command() -> list[str]:
    """How it is called: $CXX, which may have arguments, or the first that is found; empty where there is none."""
    found = filter(None, map(shutil.which, ("c++", "g++", "clang++")))
    return shlex.split(os.environ.get("CXX", "")) or [*found][:1]
