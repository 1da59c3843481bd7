"""Builds llama.cpp for the CPU of this machine: run once by the environment's own Python, after its pins are there.

The source distribution of `llama-cpp-python` carries the whole of llama.cpp. Its prebuilt packages use AVX2 at most,
which costs a CPU with AVX512, bfloat16 or AMX instructions most of its speed. The programs and a record of the build go
to `sys.prefix/llama.cpp`. Without a compiler nothing is built, and the adapter falls back on the prebuilt package.
"""

import json
import shutil
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

SOURCE = "llama-cpp-python==0.3.36"
FLAGS = (
    "-DCMAKE_BUILD_TYPE=Release",
    "-DGGML_NATIVE=ON",  # every instruction set that this CPU has
    "-DBUILD_SHARED_LIBS=OFF",
    *(f"-DLLAMA_{part}=OFF" for part in ("OPENSSL", "BUILD_TESTS", "BUILD_EXAMPLES", "BUILD_UI", "USE_PREBUILT_UI")),
)
PROGRAMS = ("llama-server", "llama-quantize")
#: Goes before llama.cpp's products by AMX. In GCC before 14, and its releases 11.5, 12.4 and 13.3, `_tile_loadconfig`
#: tells the compiler that it reads 8 of the 64 bytes (GCC's bug 114098), so the shapes of the tiles are never stored
#: and the first product of quantized weights is an illegal instruction; `_tile_loadd` does not tell that it reads.
AMX_MEND = """\
#if defined(__AMX_TILE__) && defined(__GNUC__) && !defined(__clang__) && __GNUC__ < 14
#include <immintrin.h>
#define _tile_loadconfig(config) __asm__ volatile("ldtilecfg %0" ::"m"(*(const char(*)[64])(config)))
#undef _tile_loadd
#define _tile_loadd(tile, base, stride) \\
  __asm__ volatile("tileloadd (%0,%1,1), %%tmm" #tile ::"r"((const void *)(base)), "r"((long)(stride)) : "memory")
#endif
"""
#: Goes to the end of a folder's CMakeLists.txt. Command lines, chat templates and images are most of the compiler's
#: work and none of a pass's: their sources are compiled several at once, as llama.cpp compiles its models (less those
#: whose definitions clash), and with fewer optimisations. What computes (ggml, src, the sampler) and the server keep
#: -O3.
LESS_WORK = {
    "common": """
set_target_properties(llama-common PROPERTIES UNITY_BUILD ON UNITY_BUILD_BATCH_SIZE 16)
set_source_files_properties(json.cpp PROPERTIES SKIP_UNITY_BUILD_INCLUSION ON)
set_source_files_properties(sampling.cpp PROPERTIES SKIP_UNITY_BUILD_INCLUSION ON COMPILE_OPTIONS -O3)
target_compile_options(llama-common PRIVATE -O1)
""",
    "tools/mtmd": """
set_target_properties(mtmd PROPERTIES UNITY_BUILD ON UNITY_BUILD_BATCH_SIZE 24)
set_source_files_properties(mtmd-helper.cpp mtmd-helper-gen.cpp PROPERTIES SKIP_UNITY_BUILD_INCLUSION ON)
target_compile_options(mtmd PRIVATE -O0)
""",
    "tools/server": """
set_target_properties(server-context llama-server-impl PROPERTIES UNITY_BUILD ON UNITY_BUILD_BATCH_SIZE 16)
""",
}


def main() -> None:
    """Builds PROGRAMS. Raises CalledProcessError where pip or the build fails."""
    target, tools = Path(sys.prefix, "llama.cpp"), Path(sys.prefix, "bin")
    if not any(map(shutil.which, ("c++", "g++", "clang++"))):
        print("no C++ compiler: llama.cpp is not built for this machine")  # noqa: T201 - into the log of the build
        return
    with tempfile.TemporaryDirectory(dir=sys.prefix) as folder:
        # the pinned scikit-build-core reads the metadata: pip would build cmake in an isolated environment
        how = ["--quiet", "--no-deps", "--no-build-isolation", "--no-binary", "llama-cpp-python"]
        _run(sys.executable, "-I", "-m", "pip", "download", *how, SOURCE, "--dest", folder)
        with tarfile.open(next(Path(folder).glob("*.tar.gz"))) as archive:
            archive.extractall(folder, filter="data")
        source, build = next(Path(folder).glob("*/vendor/llama.cpp")), f"{folder}/build"
        products = source / "ggml/src/ggml-cpu/amx/mmq.cpp"
        products.write_text(AMX_MEND + products.read_text())
        for place, lines in LESS_WORK.items():
            with (source / place / "CMakeLists.txt").open("a") as file:
                file.write(lines)
        cmake, ninja = tools / "cmake", tools / "ninja"
        _run(cmake, "-G", "Ninja", f"-DCMAKE_MAKE_PROGRAM={ninja}", "-S", source, "-B", build, *FLAGS)
        _run(ninja, "-C", build, *PROGRAMS)
        target.mkdir(exist_ok=True)
        for program in PROGRAMS:
            shutil.copy2(f"{build}/bin/{program}", target / program)
            _run("strip", target / program)
    flags = next(line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith(("flags", "Feat")))
    # told at this verbosity only, before the model is found to be missing
    command = [str(target / "llama-server"), "--offline", "--verbosity", "4", "--model", "/nonexistent"]
    said = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False).stdout
    system = next((line.partition("system_info: ")[2] for line in said.splitlines() if "system_info: " in line), "")
    record = {
        "source": SOURCE,
        "cmake": FLAGS,
        "cpu_flags": sorted(flags.partition(":")[2].split()),
        "enabled": [part.split(" = ")[0].split()[-1] for part in system.split("|") if part.strip().endswith("= 1")],
    }
    (target / "build.json").write_text(json.dumps(record))


def _run(*command: object) -> None:
    subprocess.run([*map(str, command)], check=True)


if __name__ == "__main__":
    main()
