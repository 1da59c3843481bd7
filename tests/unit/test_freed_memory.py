"""Freed blocks go back to the system, whatever sizes were freed before them."""

import subprocess
import sys

import pytest

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
