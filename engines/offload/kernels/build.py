"""Builds C++ sources with the host's compiler, once per source, compiler and CPU, and loads the libraries."""

import contextlib
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

from engines.common.folders import build_once
from engines.common.tied_process import run_tied
from harness.api import HarnessError
from harness.common.compiler import compiler_command

CSRC = Path(__file__).with_name("csrc")
#: Without -ffast-math sums keep their order, so a result depends on its own operands and not on what shares the call.
_FLAGS = ("-O3", "-march=native", "-std=c++17", "-fPIC", "-fopenmp", "-fno-math-errno", "-fno-trapping-math")
_BYTES = 1 << 20
_OPENMP = re.compile(r"/lib(?:gomp|omp|iomp5)[^/]*\.so[^/]*$")


class NoCompilerError(Exception):
    """The host cannot build a kernel; the message says why."""


def load(source: Path, cache: Path, define: str = "") -> ctypes.CDLL:
    """The shared library of `source`, compiled with the macro `define` if given. Raises NoCompilerError."""
    compiler = compiler_command()
    if not compiler:
        raise NoCompilerError("no C++ compiler found")
    return _load(source, cache, tuple(compiler), (f"-D{define}",) if define else ())


@functools.cache
def _load(source: Path, cache: Path, compiler: Sequence[str], macros: Sequence[str]) -> ctypes.CDLL:
    try:
        link = openmp(Path("/proc/self/maps").read_text(encoding="utf-8", errors="surrogateescape"))
        version = subprocess.run([*compiler, "--version"], capture_output=True, check=True, timeout=60).stdout
        texts = [path.read_bytes() for path in (source, *sorted(source.parent.glob("*.h")))]
        words = shlex.join([*compiler, *_FLAGS, *macros, link]).encode()
        key = hashlib.sha256(b"\n".join([*texts, version, _cpu(), words]))
        folder = cache / "kernels" / f"{source.stem}-{key.hexdigest()[:16]}"

        def build(temporary: Path) -> None:
            part, whole = str(temporary / "kernel.o"), str(temporary / "kernel.so")
            for step in (["-c", *_FLAGS, *macros, str(source), "-o", part], ["-shared", part, link, "-o", whole]):
                run_tied([*compiler, *step], temporary, timeout_s=600)

        return ctypes.CDLL(str(build_once(folder, f"kernel {source.stem}", _BYTES, build) / "kernel.so"))
    except (OSError, subprocess.SubprocessError, HarnessError) as exc:
        raise NoCompilerError(f"{shlex.join(compiler)} cannot build {source.name}: {_reason(exc)}") from exc


def function(source: Path, name: str, arguments: Sequence[Any], cache: Path, define: str = "") -> Any:
    """The function `name`(`arguments`) -> void of a source's library. Raises NoCompilerError."""
    kernel = getattr(load(source, cache, define), name)
    kernel.argtypes = list(arguments)
    kernel.restype = None
    return kernel


def openmp(maps: str) -> str:
    """The OpenMP library to link with: the one that torch has loaded, read from /proc/self/maps, else -fopenmp.

    With two libraries the idle threads of one spin on the CPUs that the other needs: GEMMs between torch's operations
    took twice as long.
    """
    mapped = (line.split(maxsplit=5)[5:] for line in maps.splitlines())  # a path may hold spaces
    return next((path for (path,) in filter(None, mapped) if _OPENMP.search(path)), "-fopenmp")


def _reason(exc: Exception) -> str:
    """The compiler's first error line, if there is one."""
    output = exc.stderr.decode(errors="replace") if isinstance(exc, subprocess.CalledProcessError) else ""
    return next((line for line in output.splitlines() if "error" in line), str(exc))


def kernels_here() -> str:
    """Identifies the kernels' sources and the kind of CPU, in few characters."""
    texts = [path.read_bytes() for path in sorted(CSRC.iterdir())]
    return hashlib.sha256(b"\n".join([*texts, _cpu()])).hexdigest()[:16]


def _cpu() -> bytes:
    """Identifies the CPU, on which the code of -march=native depends."""
    lines: list[bytes] = []
    with contextlib.suppress(OSError):  # no /proc
        lines = Path("/proc/cpuinfo").read_bytes().split(b"\n")
    features = [line for line in lines if line.startswith((b"flags", b"Features", b"isa", b"cpu\t", b"features"))]
    return features[0] if features else platform.processor().encode() + platform.node().encode()
