"""Freed blocks go back to the system, whatever sizes were freed before them."""

import subprocess
import sys

import pytest

from engines.offload import loader
from tests.offload import OTHERS, load, tiny

#: Prints by how many MiB memory has grown once blocks of ever other sizes were freed, but for small ones between them.
GROWN = """
import ctypes, sys
from engines.common.freed_memory import return_freed_memory

libc = ctypes.CDLL(None)
libc.malloc.restype = ctypes.c_void_p

def block(size):
    address = libc.malloc(ctypes.c_size_t(size))
    ctypes.memset(address, 1, size)
    return ctypes.c_void_p(address)

def resident():
    return int(open("/proc/self/statm").read().split()[1]) * 4 // 1024

if sys.argv[1] == "returned":
    return_freed_memory()
libc.free(block(30 << 20))  # the threshold, if it may grow, is 30 MiB now
before = resident()
for size in range(3, 23):
    large = block(size << 20)
    block(1000)  # stays
    libc.free(large)
print(resident() - before)
"""


def grown(how: str) -> int:
    done = subprocess.run([sys.executable, "-c", GROWN, how], capture_output=True, text=True, check=True)
    return int(done.stdout)


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="glibc's allocator")
def test_blocks_that_were_freed_do_not_stay():
    assert grown("kept") > 20, "the allocator of this machine keeps nothing: this test shows nothing"
    assert grown("returned") < 3


@pytest.mark.parametrize(
    ("family", "budget", "returns"),
    [("mixtral", 400 << 20, True), ("mixtral", None, False), ("llama", 400 << 20, False)],
)
def test_mixtures_under_a_limit_return_what_they_free(tmp_path, monkeypatch, family, budget, returns):
    calls = []
    monkeypatch.setattr(loader, "return_freed_memory", lambda: calls.append(family))
    model = tiny(tmp_path / "model", family, **OTHERS.get(family, {}))
    engine, _ = load(model, tmp_path, budget=budget, gpu_batch_size=2)
    engine.close()
    assert bool(calls) == returns
