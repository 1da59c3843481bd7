"""The device's kernels in Triton's interpreter, against the references: quantization to the bit, attention closely."""

import importlib.util
import os

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

if importlib.util.find_spec("triton") is None and "CI" not in os.environ:
    pytest.skip("no Triton here: make .venv/.triton", allow_module_level=True)

from engines.offload.kernels import panels, quantize
from engines.offload.kernels.attention import AttentionMetadata, AttentionSpec
from engines.offload.kernels.layer_blocks import LayerBlocks
from engines.offload.kernels.merge import merge_rows
from engines.offload.kernels.quantizer import exact12_pack
from engines.offload.kernels.reference_attention import reference_attention
from engines.offload.kernels.triton_attention import parts_of, triton_attention, triton_merge_rows
from engines.offload.kernels.triton_panels import unpack12
from engines.offload.kernels.triton_quantizer import pack, unpack
from engines.offload.memory.kv_blocks import BLOCK_SIZE
from engines.offload.memory.storage import BITS, GROUPS, Grouped, Plain, Storage
from tests.offload import KERNELS, quantizer_of

DEVICE = "cpu" if os.environ.get("TRITON_INTERPRET") == "1" else "cuda"
pytestmark = [pytest.mark.gpu] if DEVICE == "cuda" else []


def odd_values(rows: int, columns: int) -> torch.Tensor:
    """Rows of normal values, of constants, with outliers, with what is no number, and very small and large ones."""
    x = torch.randn(rows, columns, generator=torch.Generator().manual_seed(rows * columns))
    x[0] = 3.5
    if rows > 1:
        x[1, ::5] *= 1e4
    if rows > 2:
        x[2, columns // 2] = torch.nan
    if rows > 3:
        x[3, 0] = torch.inf
    if rows > 4:
        x[4] *= 1e-6
    if rows > 5:
        x[5] *= 1e6
    return x.to(DEVICE)


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("group", GROUPS)
@pytest.mark.parametrize("columns", [8, 64, 72, 200])
def test_packing_is_the_definition_to_the_bit(bits: int, group: int, columns: int) -> None:
    how = Grouped(bits, group)
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        x = odd_values(7, columns).to(dtype)
        assert torch.equal(pack(x, how).cpu(), quantize.pack(x.cpu(), how))


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("columns", [8, 64, 72, 1100])
def test_unpacking_is_the_definition_to_the_bit(bits: int, columns: int) -> None:
    how = Grouped(bits, 64)
    packed = quantize.pack(odd_values(7, columns).cpu(), how)
    dtypes = [torch.float32, torch.float16, *([torch.bfloat16] if DEVICE == "cuda" else [])]  # interpreted it truncates
    for dtype in dtypes:
        out = torch.empty(7, columns, dtype=dtype, device=DEVICE)
        unpack(packed.to(DEVICE), out, how)
        expected = quantize.unpack(packed, columns, how).to(dtype)
        torch.testing.assert_close(out.cpu(), expected, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("shape", [(16, 64), (40, 200), (7, 33), (33, 130)])
def test_unpacking_twelve_bits_gives_back_every_bit(shape) -> None:
    weight = torch.randn(shape, generator=torch.Generator().manual_seed(0)).bfloat16()
    weight[0, :3] = torch.tensor([torch.nan, -torch.inf, 1e-39])  # exceptions of a chunk, and a denormal
    weight[-1] = 0
    weight[-1, -1] = -0.0
    packed = exact12_pack(KERNELS.parent)(weight)
    assert packed is not None
    out = torch.empty(shape, dtype=torch.bfloat16, device=DEVICE)
    unpack12(packed.to(DEVICE), out)
    assert torch.equal(out.cpu().view(torch.int16), weight.view(torch.int16))
    assert torch.equal(panels.unpack12(packed, *shape).view(torch.int16), weight.view(torch.int16))


def pages_of(
    stored: Storage, lengths: list[int], kv_heads: int, dim: int, seed: int
) -> tuple[LayerBlocks, torch.Tensor]:
    """KVBlocks for sequences of these lengths, in no order, and the table of them."""
    generator = torch.Generator().manual_seed(seed)
    counts = [-(-n // BLOCK_SIZE) for n in lengths]
    rows = quantizer_of(stored).pack(torch.randn(sum(counts) + 2, 2, kv_heads, BLOCK_SIZE, dim, generator=generator))
    order = torch.randperm(sum(counts) + 2, generator=generator).tolist()
    table = torch.zeros(len(lengths), max(counts), dtype=torch.int32)
    for i, count in enumerate(counts):
        table[i, :count] = torch.tensor([order.pop() for _ in range(count)])
    return LayerBlocks(rows.to(DEVICE)), table


@settings(max_examples=15, deadline=None)  # the interpreter is slow, and CUDA compiles most of them anew
@given(
    parts=st.lists(st.tuples(st.integers(0, 90), st.integers(1, 40)), min_size=1, max_size=4),
    group=st.sampled_from([1, 2, 3, 7]),
    dim=st.sampled_from([16, 64, 80]),
    window=st.sampled_from([None, 1, 17, 64]),
    softcap=st.sampled_from([None, 5.0]),
    sinks=st.booleans(),
    stored=st.sampled_from([Plain("float32"), Plain("float16"), Grouped(4, 64), Grouped(3, 32), Grouped(8, 64)]),
    single=st.booleans(),
    staged=st.booleans(),
)
def test_attention_is_the_definition(parts, group, dim, window, softcap, sinks, stored, single, staged) -> None:
    cached = [a for a, _ in parts]
    counts = [1 if single else b for _, b in parts]
    kv_heads = 2
    blocks, table = pages_of(stored, [a + b for a, b in zip(cached, counts, strict=True)], kv_heads, dim, sum(cached))
    if staged:  # further apart there
        half = len(blocks.rows) // 2
        room = torch.cat([blocks.rows[half:]] * 2, 1)
        blocks = LayerBlocks(blocks.rows[:half].contiguous(), room[:, :2])
    segments = AttentionMetadata.of(counts, cached, table, lambda tensor: tensor.to(DEVICE))
    query = torch.randn(kv_heads * group, sum(counts), dim, generator=torch.Generator().manual_seed(1)).to(DEVICE)
    spec = AttentionSpec(dim**-0.5, window, softcap, torch.randn(kv_heads * group).to(DEVICE) if sinks else None)
    lse = [torch.empty(sum(counts), kv_heads * group, device=DEVICE) for _ in range(2)]
    found = triton_attention(stored)(query, blocks, segments, spec, lse[0])
    expected = reference_attention(quantizer_of(stored))(query, blocks, segments, spec, lse[1])
    torch.testing.assert_close(found, expected, rtol=2e-5, atol=2e-5)
    torch.testing.assert_close(lse[0], lse[1], rtol=2e-5, atol=2e-5)
    assert torch.equal(triton_attention(stored)(query, blocks, segments, spec), found)


@pytest.mark.parametrize("stored", [Plain("float32"), Grouped(4, 64)], ids=lambda s: s.name)
@pytest.mark.parametrize(("window", "sinks"), [(None, False), (None, True), (300, True)])
def test_a_long_context_shared_by_several_programs_is_attended_to_as_a_whole(stored, window, sinks) -> None:
    """Beside a short one, and one all of whose blocks are elsewhere."""
    cached, kv_heads, group, dim = [1100, 5, -1], 2, 3, 32
    blocks, table = pages_of(stored, [n + 1 for n in cached], kv_heads, dim, 4)
    segments = AttentionMetadata.of([1] * 3, cached, table, lambda tensor: tensor.to(DEVICE))
    query = torch.randn(kv_heads * group, 3, dim, generator=torch.Generator().manual_seed(1)).to(DEVICE)
    spec = AttentionSpec(dim**-0.5, window, None, torch.randn(kv_heads * group).to(DEVICE) if sinks else None)
    lse = [torch.empty(3, kv_heads * group, device=DEVICE) for _ in range(2)]
    found = triton_attention(stored, wanted=100)(query, blocks, segments, spec, lse[0])
    expected = triton_attention(stored, wanted=1)(query, blocks, segments, spec, lse[1])
    torch.testing.assert_close(found, expected, rtol=2e-5, atol=2e-5)
    torch.testing.assert_close(lse[0], lse[1], rtol=2e-5, atol=2e-5)
    without = triton_attention(stored, wanted=100)(query, blocks, segments, spec)
    assert torch.equal(without, found)


def test_a_context_is_shared_while_the_device_has_room() -> None:
    assert parts_of(16_384, 64, programs=32, wanted=264) == 16, "the first power of two that fills it"
    assert parts_of(16_384, 64, programs=264, wanted=264) == 1
    assert parts_of(700, 64, programs=1, wanted=264) == 2, "each has four tiles of keys"
    assert parts_of(1 << 20, 64, programs=1, wanted=264) == 32


def test_all_blocks_may_be_staged() -> None:
    stored = Plain("float16")
    blocks, table = pages_of(stored, [20, 30], 2, 16, 3)
    segments = AttentionMetadata.of([1, 4], [19, 26], table, lambda tensor: tensor.to(DEVICE))
    query = torch.randn(2, 5, 16, generator=torch.Generator().manual_seed(0)).half().to(DEVICE)
    staged = LayerBlocks(blocks.rows[:0], blocks.rows)
    found = triton_attention(stored)(query, staged, segments, AttentionSpec(0.25))
    assert torch.equal(found, triton_attention(stored)(query, blocks, segments, AttentionSpec(0.25)))


def test_a_sequence_without_blocks_gets_zeros_and_no_weight() -> None:
    """A sequence all of whose blocks are elsewhere."""
    blocks, table = pages_of(Plain("float32"), [8, 8], 2, 16, 0)
    segments = AttentionMetadata.of([1, 1], [-1, 7], table, lambda tensor: tensor.to(DEVICE))
    lse = torch.empty(2, 4, device=DEVICE)
    query = torch.ones(4, 2, 16, device=DEVICE)
    found = triton_attention(Plain("float32"))(query, blocks, segments, AttentionSpec(0.25), lse)
    assert (found[0] == 0).all() and (lse[0] == -torch.inf).all()
    assert (found[1] != 0).all() and lse[1].isfinite().all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_host_attention_is_merged_into_its_rows_alone(dtype: torch.dtype) -> None:
    """Also where the device or the host attended to nothing."""
    generator = torch.Generator().manual_seed(0)
    out = torch.randn(9, 5, 24, generator=generator).to(DEVICE, dtype)[:, :3]
    other = torch.randn(4, 3, 24, generator=generator).to(DEVICE, dtype)
    lse, other_lse = (10 * torch.randn(n, 3, generator=generator).to(DEVICE) for n in (9, 4))
    rows = torch.tensor([7, 0, 3, 8], device=DEVICE)
    lse[7], other_lse[2] = -torch.inf, -torch.inf
    expected, found = out.clone(), out.clone()
    merge_rows(expected, lse, rows, other, other_lse)
    triton_merge_rows(found, lse, rows, other, other_lse)
    torch.testing.assert_close(found, expected)
    assert torch.equal(found[[1, 2, 4, 5, 6]], out[[1, 2, 4, 5, 6]])
    assert torch.equal(found[7], other[0]) and torch.equal(found[3], out[3])
