"""Kernels on other CPUs: of x86-64 without AVX and with AVX2 here, of ARM by a cross-compiler and an emulator."""

import os
import platform
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from engines.offload.kernels.build import CSRC

ROOT = Path(__file__).parents[2]
CHECK = ROOT / "tests" / "kernels_check.cpp"
#: As in engines/offload/kernels/build.py, for a given CPU instead of this one.
FLAGS = ("-std=c++17", "-fPIC", "-fopenmp", "-fno-math-errno", "-fno-trapping-math")
TARGETS = {
    "x86-64": (("g++", "-march=x86-64"), ()),
    "aarch64": (("aarch64-linux-gnu-g++", "-march=armv8-a"), ("qemu-aarch64",)),
}
STORED = ("float32", "bfloat16", "float16", "bits3", "bits4", "bits8")
SOURCES = [(path, "") for path in sorted(CSRC.glob("*.cpp")) if path.stem != "attention"] + [
    (CSRC / "attention.cpp", f"-DSTORED_{name}") for name in STORED
]
#: Tests of each kernel against what it stands for.
CHOSEN = "kernel_multiplies_weights or every_way_gives_the_same_bits or product_is_the_exact_one"

pytestmark = [pytest.mark.slow, pytest.mark.release]


@pytest.fixture(params=TARGETS)
def target(request) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """A compiler for a CPU, and what runs its programs."""
    compiler, emulator = TARGETS[request.param]
    if not all(map(shutil.which, (compiler[0], *emulator))):
        missing = f"no compiler and emulator for {request.param}: apt-get install g++-aarch64-linux-gnu qemu-user"
        (pytest.fail if os.environ.get("CI") else pytest.skip)(missing)
    return compiler, emulator


def test_every_kernel_compiles(target):
    for source, macro in SOURCES:
        command = [*target[0], *FLAGS, *filter(None, [macro]), "-fsyntax-only", str(source)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode == 0, f"{source.name} {macro}: {done.stderr[:2000]}"


@pytest.mark.skipif(platform.machine() != "x86_64" or not shutil.which("g++"), reason="GCC's code for AMX")
@pytest.mark.parametrize(("name", "macros"), [("attention", ["-DSTORED_bfloat16"]), ("panel_gemm", [])])
def test_kernels_for_matrix_units_compile(name, macros):
    command = ["g++", "-march=sapphirerapids", *FLAGS, *macros, "-fsyntax-only", str(CSRC / f"{name}.cpp")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[:2000]


def test_kernels_compute_what_plain_loops_do(target, tmp_path):
    compiler, emulator = target
    program = tmp_path / "check"
    sources = [CHECK, *(CSRC / f"{name}.cpp" for name in ("gemm", "hadamard", "quantizer"))]
    subprocess.run([*compiler, *FLAGS, "-O1", "-static", *map(str, sources), "-o", str(program)], check=True)
    done = subprocess.run([*emulator, str(program)], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "")


@pytest.mark.parametrize("cpu", ["x86-64", "x86-64-v3"])
def test_what_tests_say_of_kernels_holds_on_lesser_cpus(cpu, tmp_path):
    """Other tests, with a compiler that heeds no instructions beyond those of every x86-64, or beyond AVX2."""
    compiler = tmp_path / "c++"
    compiler.write_text(f'#!/bin/bash\nexec g++ "${{@/-march=native/-march={cpu}}}"\n')
    compiler.chmod(0o755)
    files = (f"tests/unit/test_offload_{name}.py" for name in ("kernels", "quantize", "tile_pool"))
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "-k", CHOSEN, *files]
    done = subprocess.run(command, cwd=ROOT, env=os.environ | {"CXX": str(compiler)}, capture_output=True, text=True,
                          check=False)  # fmt: skip
    assert done.returncode == 0, done.stdout[-3000:]
