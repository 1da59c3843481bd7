"""What the host's compiled attention kernel says of its scratch memory."""

import ctypes
from pathlib import Path

from engines.offload.kernels.build import CSRC, function
from engines.offload.memory.kv_blocks import BLOCK_SIZE
from engines.offload.memory.storage import Storage
from harness.api import Dtype, ModelShape


def attention_scratch(
    stored: Storage, cache: Path, shape: ModelShape, longest: int, dtype: Dtype, threads: int, sparse: bool
) -> tuple[int, bool]:
    """Bytes of scratch memory that a call of the kernel of `compiled_attention` takes at most, for sequences of up to
    `longest` tokens and queries in `dtype`, and whether it attends to prompts in bfloat16. `sparse`: not to all values.

    The kernel takes more for each segment and head of a call, 40 bytes at most. Raises NoCompilerError.
    """
    number, small = ctypes.c_int64, ctypes.c_int
    arguments = [*[number] * 3, small, number, *[small] * 3, number, small, ctypes.POINTER(number)]
    source, name = CSRC / "attention.cpp", f"attention_scratch_{stored.name}"
    count = function(source, name, arguments, cache, f"STORED_{stored.name}")
    found, dim = (number * 2)(), shape.head_dim
    count(shape.num_heads, shape.num_kv_heads, dim, log2(BLOCK_SIZE), longest, sparse, dtype == "bfloat16", threads,
          stored.row_bytes(dim), log2(stored.grain), found)  # fmt: skip
    return found[0], bool(found[1])


def log2(number: int) -> int:
    """Of a power of two."""
    return number.bit_length() - 1
