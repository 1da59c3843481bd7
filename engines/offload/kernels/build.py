"""Builds C++ sources with the host's compiler, once per source, compiler and CPU, and loads them."""

from __future__ import annotations

import ctypes
import hashlib
import os
import shutil
import subprocess
from pathlib import Path

from engines.folders import build_once

#: Sums may be reordered, which is what makes loops over a row vector code; NaN and infinity keep their meaning.
_FLAGS = ("-O3", "-march=native", "-std=c++17", "-shared", "-fPIC", "-fno-math-errno", "-fassociative-math",
          "-fno-signed-zeros", "-fno-trapping-math")  # fmt: skip
_BYTES = 1 << 20


class NoCompilerError(Exception):
    """The host cannot build a kernel; the text says why."""


def load(source: Path, cache: Path) -> ctypes.CDLL:
    """The shared library of `source`. Raises NoCompilerError; the caller has another way."""
    compiler = os.environ.get("CXX") or next(filter(None, map(shutil.which, ("c++", "g++", "clang++"))), None)
    if compiler is None:
        raise NoCompilerError("no C++ compiler found")
    try:
        version = subprocess.run([compiler, "--version"], capture_output=True, check=True, timeout=60).stdout
        key = hashlib.sha256(b"\n".join([source.read_bytes(), version, _cpu(), " ".join(_FLAGS).encode()]))
        folder = cache / "kernels" / f"{source.stem}-{key.hexdigest()[:16]}"

        def build(temporary: Path) -> None:
            command = [compiler, *_FLAGS, str(source), "-o", str(temporary / "kernel.so")]
            subprocess.run(command, capture_output=True, check=True, timeout=600)

        return ctypes.CDLL(str(build_once(folder, f"kernel {source.stem}", _BYTES, build) / "kernel.so"))
    except (OSError, subprocess.SubprocessError) as exc:
        raise NoCompilerError(f"{compiler} cannot build {source.name}: {exc}") from exc


def _cpu() -> bytes:
    """What -march=native depends on."""
    lines = Path("/proc/cpuinfo").read_bytes().split(b"\n")
    return next((line for line in lines if line.startswith((b"flags", b"Features"))), b"")
