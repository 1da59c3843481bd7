"""Builds C++ sources with the host's compiler, once per source, compiler and CPU, and loads them."""

from __future__ import annotations

import ctypes
import functools
import hashlib
import platform
import re
import shlex
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from engines.common.compiler import command
from engines.common.folders import build_once
from harness.api import HarnessError

#: Sums value_topk their order, so that a result depends on its own operands and on nothing that shares the call.
_FLAGS = ("-O3", "-march=native", "-std=c++17", "-fPIC", "-fopenmp", "-fno-math-errno", "-fno-trapping-math")
_BYTES = 1 << 20
_OPENMP = re.compile(r"/lib(?:gomp|omp|iomp5)[^/]*\.so[^/]*$")


class NoCompilerError(Exception):
    """The host cannot build a kernel; the text says why."""


def load(source: Path, cache: Path, define: str = "") -> ctypes.CDLL:
    """The shared library of `source`, compiled with the macro `define` if there is one.

    Raises NoCompilerError; the caller has another way.
    """
    compiler = command()
    if not compiler:
        raise NoCompilerError("no C++ compiler found")
    return _load(source, cache, tuple(compiler), (f"-D{define}",) if define else ())


@functools.cache
def _load(source: Path, cache: Path, compiler: Sequence[str], macros: Sequence[str]) -> ctypes.CDLL:
    link = openmp(Path("/proc/self/maps").read_text(encoding="utf-8", errors="surrogateescape"))
    try:
        version = subprocess.run([*compiler, "--version"], capture_output=True, check=True, timeout=60).stdout
        texts = [path.read_bytes() for path in (source, *sorted(source.parent.glob("*.h")))]
        words = shlex.join([*compiler, *_FLAGS, *macros, link]).encode()
        key = hashlib.sha256(b"\n".join([*texts, version, _cpu(), words]))
        folder = cache / "kernels" / f"{source.stem}-{key.hexdigest()[:16]}"

        def build(temporary: Path) -> None:
            part, whole = str(temporary / "kernel.o"), str(temporary / "kernel.so")
            for step in (["-c", *_FLAGS, *macros, str(source), "-o", part], ["-shared", part, link, "-o", whole]):
                subprocess.run([*compiler, *step], capture_output=True, check=True, timeout=600)

        return ctypes.CDLL(str(build_once(folder, f"kernel {source.stem}", _BYTES, build) / "kernel.so"))
    except (OSError, subprocess.SubprocessError, HarnessError) as exc:
        raise NoCompilerError(f"{shlex.join(compiler)} cannot build {source.name}: {_reason(exc)}") from exc


def function(source: Path, name: str, arguments: Sequence[Any], cache: Path, define: str = "") -> Any:
    """A source's function of that name, which returns nothing. Raises as `load`."""
    found = getattr(load(source, cache, define), name)
    found.argtypes = list(arguments)
    found.restype = None
    return found


def openmp(maps: str) -> str:
    """What to link with: the OpenMP library that torch has loaded, by /proc/self/maps, else the compiler's own.

    With two of them each one's threads would spin on the CPUs while the other's have work: products between
    torch's operations then took twice as long.
    """
    mapped = (line.split(maxsplit=5)[5:] for line in maps.splitlines())  # a path may hold spaces
    return next((path for (path,) in filter(None, mapped) if _OPENMP.search(path)), "-fopenmp")


def _reason(exc: Exception) -> str:
    """The compiler's first error, where it has said one."""
    said = exc.stderr.decode(errors="replace") if isinstance(exc, subprocess.CalledProcessError) else ""
    return next((line for line in said.splitlines() if "error" in line), str(exc))


def _cpu() -> bytes:
    """What -march=native depends on."""
    lines = Path("/proc/cpuinfo").read_bytes().split(b"\n")
    found = [line for line in lines if line.startswith((b"flags", b"Features", b"isa", b"cpu\t", b"features"))]
    return found[0] if found else platform.processor().encode() + platform.node().encode()
