"""Locates the host's C++ compiler, for kernels that are built on first use."""

import os
import shlex
import shutil


def compiler_command() -> list[str]:
    """The compiler's command line: $CXX with its arguments, else c++, g++ or clang++; empty where there is none."""
    installed = filter(None, map(shutil.which, ("c++", "g++", "clang++")))
    return shlex.split(os.environ.get("CXX", "")) or [*installed][:1]
