"""The compiled attention kernel's memory, what it reads of the cache, and how its work is divided between threads."""

import ctypes
import math
import mmap
import resource
import shutil
from dataclasses import replace

import psutil
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from engines.models import shapes
from engines.offload.kernels import AttentionMetadata, AttentionSpec
from engines.offload.kernels.attention import compiled_attention
from engines.offload.kernels.attention_scratch import attention_scratch
from engines.offload.kernels.build import CSRC, load
from engines.offload.kernels.layer_blocks import LayerBlocks
from engines.offload.memory.attention_scratch import attention_memory, may_be_in_bfloat16
from engines.offload.memory.kv_blocks import BLOCK_SIZE, blocks_for
from engines.offload.memory.storage import Grouped, Plain
from tests.offload import quantizer_of

SHAPE = shapes.shape("facebook/opt-125m")
STORED = [Plain("float32"), Plain("bfloat16"), Plain("float16"), Grouped(3, 128), Grouped(4, 64), Grouped(8, 32)]
#: Query rows of a piece, at least and at most, as in csrc/attention_items.h.
LEAST, MOST = 128, 8192


@given(
    st.integers(1, 12), st.integers(1, 80), st.integers(1, 300), st.integers(1, 300_000), st.integers(1, 64),
    st.sampled_from(["float32", "bfloat16", "float16"]), st.booleans(),
)  # fmt: skip
@pytest.mark.parametrize("stored", STORED)
def test_scratch_memory_is_foreseen_to_the_byte(cache, stored, kv_heads, group, dim, longest, threads, dtype, sparse):
    shape = replace(SHAPE, num_heads=kv_heads * group, num_kv_heads=kv_heads, head_dim=dim)
    counted, in_bfloat16 = attention_scratch(stored, cache, shape, longest, dtype, threads, sparse)
    assert attention_memory(shape, stored, longest, threads, in_bfloat16, sparse) == (counted, 0)
    assert may_be_in_bfloat16(stored, dtype) or not in_bfloat16


def test_prompts_in_bfloat16_take_little_memory_however_long():
    """32k tokens on 16 threads took 640 MB of a plan where they need 9."""
    shape = replace(SHAPE, num_heads=16, num_kv_heads=8, head_dim=128)
    in_panels, in_bfloat16 = (attention_memory(shape, Plain("bfloat16"), 32768, 16, half, False)[0] for half in (0, 1))
    assert in_panels == 16 * 32768 * 4 * (128 + 128 + 48)
    assert in_bfloat16 < 10e6


def test_attention_without_memory_raises_and_nothing_else(cache):
    """4 million tokens, all of them in one block, of which two threads would need 2.7 GiB each."""
    kernel, length = compiled_attention(Plain("float32"), cache, threads=2), 1 << 22
    blocks, query, spec = LayerBlocks(torch.randn(1, 2, 1, BLOCK_SIZE, 64)), torch.randn(1, 2, 64), AttentionSpec(0.1)
    long, short = (AttentionMetadata.of([2], [n - 2], torch.zeros(1, blocks_for(n)).int()) for n in (length, 8))
    before = kernel(query, blocks, short, spec)
    long.locate(blocks)
    limits = resource.getrlimit(resource.RLIMIT_AS)
    try:
        resource.setrlimit(resource.RLIMIT_AS, (psutil.Process().memory_info().vms + (256 << 20), limits[1]))
        with pytest.raises(MemoryError, match="no memory for attention of 2 tokens, to up to 4194304 each"):
            kernel(query, blocks, long, spec)
    finally:
        resource.setrlimit(resource.RLIMIT_AS, limits)
    assert torch.equal(kernel(query, blocks, short, spec), before)


#: Sequences whose first row does not see their first blocks through a window of 44: rows, and tokens before them.
WINDOW, LATER = 44, [(1, 308), (1, 60), (9, 67), (40, 308), (2, 260), (300, 263)]


@pytest.mark.parametrize("stored", STORED)
@pytest.mark.parametrize("value_topk", [1.0, 0.5])
@pytest.mark.parametrize("heads", [2, 16])
def test_nan_before_a_window_is_not_seen(cache, stored, value_topk, heads):
    torch.manual_seed(0)
    kernel, spec = compiled_attention(stored, cache, threads=2), AttentionSpec(0.2, WINDOW, value_topk=value_topk)
    dtype = torch.bfloat16 if may_be_in_bfloat16(stored, "bfloat16") else torch.float32
    for count, before in LATER:
        length = before + count
        table = torch.randperm(blocks_for(length)).int()
        metadata = AttentionMetadata.of([count], [before], table[None])
        rows = quantizer_of(stored).pack(torch.randn(len(table), 2, 1, BLOCK_SIZE, 40))
        query = torch.randn(heads, count, 40).to(dtype)
        expected = kernel(query, LayerBlocks(rows), metadata, spec)
        unseen = table[: (before + 1 - WINDOW) // BLOCK_SIZE].long()
        assert len(unseen)
        rows[unseen] = 255 if rows.dtype == torch.uint8 else torch.nan  # 255: scales and minima of NaN
        assert torch.equal(kernel(query, LayerBlocks(rows), metadata, spec), expected), (count, before)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("count", [1, 30])
def test_blocks_before_a_window_are_not_read(cache, dtype, count):
    """Their pages stay as untouched as they came from the system."""
    dim, before, page = 4096 // (2 * BLOCK_SIZE * dtype.itemsize), 600, mmap.PAGESIZE
    assert page == 4096
    size = blocks_for(before + count)
    with mmap.mmap(-1, size * page) as memory:
        memory.madvise(mmap.MADV_NOHUGEPAGE)
        rows = torch.frombuffer(memory, dtype=dtype).view(size, 2, 1, BLOCK_SIZE, dim)
        address, resident = rows.data_ptr(), (ctypes.c_ubyte * size)()
        kernel = compiled_attention(Plain(str(dtype).removeprefix("torch.")), cache, threads=1)
        metadata = AttentionMetadata.of([count], [before], torch.arange(size).int()[None])
        kernel(torch.randn(2, count, dim).to(dtype), LayerBlocks(rows), metadata, AttentionSpec(0.2, WINDOW))
        assert ctypes.CDLL(None).mincore(ctypes.c_void_p(address), ctypes.c_size_t(size * page), resident) == 0
        del rows
    first = (before + 1 - WINDOW) // BLOCK_SIZE
    assert [bool(state & 1) for state in resident] == [False] * first + [True] * (size - first)


@pytest.mark.parametrize("stored", [Plain("float32"), Plain("bfloat16"), Grouped(4, 64)])
@pytest.mark.parametrize(
    ("heads", "rules"),
    [((4, 1), {}), ((4, 1), {"window": 150}), ((4, 1), {"value_topk": 0.3}), ((40, 2), {}), ((40, 2), {"window": 150})],
)
def test_however_many_threads_attend_the_bits_are_the_same(cache, stored, rules, heads):
    """Where threads are more than heads, they share the tokens of a prompt."""
    torch.manual_seed(0)
    spans = [(1, 300), (700, 41), (2, 500)]
    counts, cached = zip(*spans, strict=True)
    table = torch.randperm(3 * 93).view(3, 93).int()
    metadata = AttentionMetadata.of(counts, cached, table)
    rows = quantizer_of(stored).pack(torch.randn(3 * 93, 2, heads[1], BLOCK_SIZE, 40))
    query = torch.randn(heads[0], sum(counts), 40)
    query = query.bfloat16() if may_be_in_bfloat16(stored, "bfloat16") else query
    spec, found = AttentionSpec(0.2, **rules), []
    for threads in (1, 2, 7):
        lse = torch.empty(sum(counts), heads[0])
        kernel = compiled_attention(stored, cache, threads)
        found.append((kernel(query, LayerBlocks(rows), metadata, spec, lse), lse))
    for out, lse in found[1:]:
        assert torch.equal(out, found[0][0])
        assert torch.equal(lse, found[0][1])


@pytest.fixture(scope="module")
def pieces(tmp_path_factory, cache):
    """Cuts a segment into pieces as the kernel does."""
    folder = tmp_path_factory.mktemp("pieces")
    for name in ("attention_items.h", "softmax.h", "simd.h"):
        shutil.copy(CSRC / name, folder)
    (folder / "pieces.cpp").write_text("""#include "attention_items.h"
extern "C" int64_t pieces(int64_t window, int64_t first, int64_t count, int64_t group, int64_t share, int64_t* out) {
  int64_t found = 0;
  each_piece({window, 1, 0, 1, nullptr}, first, count, group, share, [&](int64_t begin, int64_t end) {
    out[2 * found] = begin, out[2 * found++ + 1] = end;
  });
  return found;
}
""")
    function = load(folder / "pieces.cpp", cache).pieces
    function.argtypes = [*[ctypes.c_int64] * 5, ctypes.c_void_p]
    function.restype = ctypes.c_int64

    def cut(window, first, count, group, share):
        out = (ctypes.c_int64 * (2 * count))()
        return [(out[2 * i], out[2 * i + 1]) for i in range(function(window, first, count, group, share, out))]

    return cut


@given(
    st.one_of(st.just(0), st.integers(1, 3000)), st.integers(0, 3000), st.integers(1, 3000), st.integers(1, 80),
    st.integers(1, 32),
)  # fmt: skip
def test_pieces_of_a_prompt_are_equal_work(pieces, window, first, count, group, threads):
    seen = [min(window or math.inf, first + row + 1) for row in range(count)]
    share = -(-sum(seen) // threads)
    found, least = pieces(window, first, count, group, share), -(-LEAST // group)
    assert [begin for begin, _ in found] == [0, *(end for _, end in found[:-1])]
    assert found[-1][1] == count
    for begin, end in found:
        size = end - begin
        assert size <= max(1, MOST // group)
        assert size >= min(least, count) or end == count
        if size > least and count - end > least:
            assert sum(seen[begin : end - 1]) < share
    assert len(found) <= threads + count * group // (MOST // 2)
