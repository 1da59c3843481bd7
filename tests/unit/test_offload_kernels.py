"""The compiled kernels against float64, and what they promise beside."""

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from engines.offload.kernels import AttentionMetadata, AttentionSpec, NoCompilerError, quantize
from engines.offload.kernels.attention import compiled_attention
from engines.offload.kernels.build import load, openmp
from engines.offload.kernels.gemm import compiled_gemm, torch_gemm
from engines.offload.kernels.layer_blocks import LayerBlocks, Target, compiled_writer, torch_writer
from engines.offload.kernels.merge import merge_attention_states
from engines.offload.kernels.quantizer import plain_quantizer
from engines.offload.kernels.reference_attention import reference_attention
from engines.offload.kernels.tile_pool import TilePool
from engines.offload.memory.kv_blocks import BLOCK_SIZE, blocks_for
from engines.offload.memory.storage import Grouped, Plain
from tests.offload import quantizer_of

DTYPES = ("float32", "bfloat16", "float16")

#: What a product is added to: one row for all such as a bias, the output itself.
STARTS = ("nothing", "row", "out")


@pytest.fixture(scope="module", params=["torch", "kernel"])
def product(request, cache):
    return torch_gemm if request.param == "torch" else compiled_gemm(Plain("float32"), cache, threads=2)


@given(st.integers(0, 40), st.integers(1, 50), st.integers(1, 50), st.sampled_from(STARTS), st.integers(0, 7))
@example(391, 2053, 70, "out", 1)
@example(391, 2053, 70, "row", 1)
@example(7, 1024, 257, "nothing", 0)
def test_products_write_into_parts_of_larger_tensors(product, rows, columns, outputs, start, margin):
    torch.manual_seed(rows)
    wide = torch.randn(rows, columns + 2 * margin)
    x, weight = wide[:, margin : margin + columns], torch.randn(outputs, columns)
    whole = torch.randn(rows, outputs + 2 * margin)
    out, before = whole[:, margin : margin + outputs], whole.clone()
    added = {"nothing": None, "row": torch.randn(outputs), "out": out}[start]
    exact = x.double() @ weight.double().T + (0 if added is None else added.double())
    product(x, weight, added, out)
    torch.testing.assert_close(out.double(), exact, rtol=1e-4, atol=1e-4)
    outside = torch.ones_like(whole, dtype=torch.bool)
    outside[:, margin : margin + outputs] = False
    assert torch.equal(whole[outside], before[outside])


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_kernel_multiplies_weights_as_they_are_stored(cache, dtype):
    torch.manual_seed(0)
    x, weight = torch.randn(50, 700), torch.randn(90, 700).to(getattr(torch, dtype))
    out = torch.empty(50, 90)
    compiled_gemm(Plain(dtype), cache, threads=2)(x, weight, None, out)
    torch.testing.assert_close(out.double(), x.double() @ weight.double().T, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("group_axis", [0, 1])
@pytest.mark.parametrize("bits", [3, 4, 8])
@pytest.mark.parametrize(("rows", "columns", "outputs"), [(50, 700, 90), (1, 2049, 33), (7, 1030, 16), (3, 5, 3)])
def test_the_kernel_multiplies_quantized_weights(cache, bits, group_axis, rows, columns, outputs):
    torch.manual_seed(0)
    how = Grouped(bits, 64, group_axis)
    x, weight = torch.randn(rows, columns), torch.randn(outputs, columns)
    packed = quantize.pack(weight if group_axis else weight.T, how)
    stored = quantize.unpack(packed, columns if group_axis else outputs, how)
    exact = x.double() @ (stored if group_axis else stored.T).double().T
    start = torch.randn(rows, outputs)
    out = start.clone()
    compiled_gemm(how, cache, threads=2)(x, packed, out, out)
    torch.testing.assert_close(out.double(), exact + start.double(), rtol=1e-5, atol=1e-4)


@given(st.integers(1, 400), st.integers(1, 600), st.integers(1, 40), st.data())
def test_a_row_does_not_depend_on_those_that_share_its_product(cache, rows, columns, outputs, data):
    """Bit for bit: so a request's result does not depend on what else runs."""
    product = compiled_gemm(Plain("bfloat16"), cache, threads=2)
    torch.manual_seed(rows)
    x, weight = torch.randn(rows, columns), torch.randn(outputs, columns).bfloat16()
    together, alone = torch.empty(rows, outputs), torch.empty(1, outputs)
    product(x, weight, None, together)
    row = data.draw(st.integers(0, rows - 1))
    product(x[row : row + 1], weight, None, alone)
    assert torch.equal(together[row : row + 1], alone)


def test_nan_in_a_weight_is_not_hidden(cache):
    weight = torch.ones(20, 30)
    weight[3, 29] = torch.nan
    out = torch.empty(8, 20)
    compiled_gemm(Plain("float32"), cache, threads=1)(torch.zeros(8, 30), weight, None, out)
    assert out.isnan()[:, 3].all()
    assert out.isnan().sum() == 8


def both_attentions(stored, cache):
    """The compiled kernel and the one in torch."""
    return compiled_attention(stored, cache, threads=2), reference_attention(quantizer_of(stored))


def packed(spans, blocks):
    """AttentionMetadata of (rows, tokens before them), on random blocks."""
    counts, cached = zip(*spans, strict=True)
    longest = max(blocks_for(c + n) for n, c in spans)
    table = torch.randperm(blocks)[: len(spans) * longest].view(len(spans), longest).int()
    return AttentionMetadata.of(counts, cached, table)


def by_hand(query, keys, values, segments, spec):
    """One row and head at a time, in float64."""
    heads, tokens, dim = query.shape
    group = heads // keys.shape[1]
    out = torch.empty(tokens, heads, dim, dtype=torch.float64)
    starts = segments.starts.tolist()
    for i, before in enumerate(segments.cached.tolist()):
        for row in range(starts[i], starts[i + 1]):
            position = before + row - starts[i]
            first = max(0, position - spec.window + 1) if spec.window else 0
            places = [(segments.block_table[i, t // BLOCK_SIZE], t % BLOCK_SIZE) for t in range(first, position + 1)]
            for head in range(heads):
                k, v = (torch.stack([c[p, head // group, t] for p, t in places]).double() for c in (keys, values))
                scores = k @ query[head, row].double() * spec.scale
                if spec.softcap:
                    scores = spec.softcap * (scores / spec.softcap).tanh()
                sink = spec.sinks[head].double().exp() if spec.sinks is not None else 0
                shares = scores.exp() / (scores.exp().sum() + sink)
                kept = shares.clone()
                kept[shares.argsort(descending=True)[math.ceil(spec.value_topk * len(shares)) :]] = 0
                out[row, head] = kept @ v * shares.sum() / kept.sum()
    return out


SPANS = [(1, 0), (1, 2), (1, 8), (1, 39), (50, 0), (7, 5), (17, 30), (2, 0)]
SHAPES = [(4, 4, 64), (8, 2, 32), (6, 1, 24), (1, 1, 7), (2, 1, 80)]
RULES = [
    {},
    {"value_topk": 0.3},
    {"value_topk": 0.1, "window": 30, "sinks": True},
    {"window": 8},
    {"softcap": 2.0},
    {"window": 40, "softcap": 1.5, "sinks": True},
]


def check_attention(kernels, stored, shape, spans, spec):
    """Kernels agree with float64 on 100 random blocks; shape: heads, those of keys and values, and columns."""
    heads, kv_heads, dim = shape
    segments, quantizer = packed(spans, 100), quantizer_of(stored)
    keys, values = (quantizer.pack(torch.randn(100, kv_heads, BLOCK_SIZE, dim)) for _ in range(2))
    rows = torch.randn(int(segments.starts[-1]), heads, dim + 3)
    query = rows[..., :dim].transpose(0, 1)  # as a model gives it: a view
    wide = [c if isinstance(stored, Plain) else quantize.unpack(c, dim, stored) for c in (keys, values)]
    exact = by_hand(query, *wide, segments, spec)
    for kernel in kernels:
        found = kernel(query, LayerBlocks(torch.stack([keys, values], 1)), segments, spec)
        # scores reach 10 and carry a few roundings of 6e-8 each, which their exponentials carry on
        torch.testing.assert_close(found.double(), exact, rtol=1e-5, atol=5e-6)


@pytest.mark.parametrize("stored", [*map(Plain, DTYPES), Grouped(4, 64), Grouped(8, 32), Grouped(3, 128)])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("more", RULES)
def test_attention_kernels_agree_with_float64(cache, stored, shape, more):
    torch.manual_seed(0)
    spec = AttentionSpec(0.3, **more | {"sinks": torch.randn(shape[0]) if more.get("sinks") else None})
    check_attention(both_attentions(stored, cache), stored, shape, SPANS, spec)


@pytest.mark.parametrize("stored", [Plain("bfloat16"), Grouped(4, 32), Grouped(4, 128), Grouped(3, 32), Grouped(8, 64)])
@pytest.mark.parametrize("shape", [(7, 1, 120), (20, 1, 40), (2, 2, 96), (5, 1, 20)])
@pytest.mark.parametrize("value_topk", [1.0, 0.3])
def test_heads_and_columns_of_any_number(cache, stored, shape, value_topk):
    torch.manual_seed(0)
    kernel, spec = compiled_attention(stored, cache, threads=2), AttentionSpec(0.1, value_topk=value_topk)
    check_attention([kernel], stored, shape, [(1, 37), (1, 8), (3, 5)], spec)


@pytest.mark.parametrize("value_topk", [1.0, 0.3])
def test_a_sink_that_outweighs_every_score_leaves_nothing_of_the_values(cache, value_topk):
    stored, spec = Plain("float32"), AttentionSpec(0.3, value_topk=value_topk, sinks=torch.full((4,), 200.0))
    check_attention(both_attentions(stored, cache), stored, (4, 2, 32), SPANS, spec)


#: Rows before and after the bounds of the blocks of 256 positions in which prompts attend in bfloat16.
PROMPTS = [(20, 0), (7, 5), (2, 0), (3, 300), (3, 254)]
CACHES = [(Plain("bfloat16"), (4, 4, 64)), (Plain("bfloat16"), (6, 2, 24)), (Plain("bfloat16"), (1, 1, 7)),
          (Plain("bfloat16"), (18, 1, 20)), (Grouped(4, 64), (2, 1, 80)), (Grouped(8, 32), (4, 2, 64)),
          (Grouped(3, 128), (2, 2, 36))]  # fmt: skip


@pytest.mark.parametrize(("stored", "shape"), CACHES)
@pytest.mark.parametrize("more", [{}, {"window": 40, "softcap": 1.5, "sinks": True}, {"window": 270}])
def test_prompts_in_bfloat16_agree_with_float64(cache, stored, shape, more):
    """Within what it costs to round each probability and each result to bfloat16, 2^-8 of it, beside float32's
    roundings in check_attention. Products of bfloat16 are exact, so log-sum-exps have only the latter."""
    torch.manual_seed(0)
    heads, kv_heads, dim = shape
    quantizer, kernel = quantizer_of(stored), compiled_attention(stored, cache, threads=2)
    spec = AttentionSpec(0.3, **more | {"sinks": torch.randn(heads) if more.get("sinks") else None})
    spans = [*PROMPTS, (1, 37)] if heads // kv_heads >= 16 else PROMPTS  # many heads are rows enough
    segments = packed(spans, 280)
    caches = [quantizer.pack(torch.randn(280, kv_heads, BLOCK_SIZE, dim)) for _ in range(2)]
    query = torch.randn(int(segments.starts[-1]), heads, dim + 3).bfloat16()[..., :dim].transpose(0, 1)
    keys, values = (c if isinstance(stored, Plain) else quantize.unpack(c, dim, stored) for c in caches)
    if TilePool(cache, 2).dtype == "bfloat16":  # what is unpacked is rounded only for units that take bfloat16
        keys, values = keys.bfloat16(), values.bfloat16()
    exact = by_hand(query, keys, values, segments, spec)
    bound = 2**-8 * (by_hand(query, keys, values.abs(), segments, spec) + exact.abs()) + 1e-5 * exact.abs() + 5e-6
    blocks, lse = LayerBlocks(torch.stack(caches, 1)), [torch.empty(query.shape[1], heads) for _ in range(2)]
    found = kernel(query, blocks, segments, spec, lse[0])
    assert found.dtype == torch.bfloat16
    assert ((found.double() - exact).abs() <= bound).all()
    if isinstance(stored, Plain):
        kernel(query.float(), blocks, segments, spec, lse[1])
        torch.testing.assert_close(lse[0], lse[1], rtol=1e-5, atol=1e-5)


@given(st.integers(4, 600), st.sampled_from([None, 5, 33, 300]), st.data())
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_prompt_may_be_cut_anywhere(cache, dtype, length, window, data):
    """Bit for bit: so a request's result does not depend on what else runs."""
    cut = data.draw(st.integers(2, length - 2))
    torch.manual_seed(length)
    compiled, values = compiled_attention(Plain(dtype), cache, threads=2), getattr(torch, dtype)
    blocks = LayerBlocks(torch.randn(80, 2, 2, BLOCK_SIZE, 48, dtype=values))
    query, spec = torch.randn(4, length, 48, dtype=values), AttentionSpec(0.2, window)
    whole = packed([(length, 0)], 80)
    together = compiled(query, blocks, whole, spec)
    for rows, before in ((slice(0, cut), 0), (slice(cut, length), cut)):
        part = AttentionMetadata.of([rows.stop - rows.start], [before], whole.block_table)
        assert torch.equal(compiled(query[:, rows], blocks, part, spec), together[rows])


@pytest.mark.parametrize("spread", [1.0, 30.0, 1000.0])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_softmax_of_scores_far_apart(cache, spread, dtype):
    torch.manual_seed(0)
    compiled, values = compiled_attention(Plain(dtype), cache, threads=2), getattr(torch, dtype)
    segments = packed([(1, 60), (60, 0)], 40)
    blocks = LayerBlocks(torch.randn(40, 2, 1, BLOCK_SIZE, 16, dtype=values))
    query, spec = (torch.randn(1, 61, 16) * spread).to(values), AttentionSpec(1.0)
    reference = reference_attention(plain_quantizer(Plain("float32")))
    exact = reference(query.double(), LayerBlocks(blocks.rows.double()), segments, spec)
    found = compiled(query, blocks, segments, spec)
    # rounded to bfloat16: probabilities of values below 5, and the result
    rounding = 0 if dtype == "float32" else 2**-8 * 5
    torch.testing.assert_close(found.double(), exact, rtol=1e-4 + rounding / 5, atol=1e-5 * spread + rounding)


def test_half_precision_is_widened_exactly(cache):
    """Every finite float16 as a value with weight one: subnormal numbers and both zeros included."""
    bits = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(torch.float16)
    finite = bits[bits.isfinite()].view(-1, 1, 1, 1).expand(-1, 1, BLOCK_SIZE, 1).contiguous()
    count = len(finite)
    table = torch.arange(count, dtype=torch.int32).view(-1, 1)
    alone = AttentionMetadata.of([1] * count, [0] * count, table)
    kernel = compiled_attention(Plain("float16"), cache, threads=2)
    blocks = LayerBlocks(torch.stack([torch.zeros_like(finite), finite], 1))
    found = kernel(torch.zeros(1, count, 1), blocks, alone, AttentionSpec(1.0))
    assert torch.equal(found.view(-1), finite[:, 0, 0, 0].float())


def test_attention_reads_blocks_where_they_are(cache):
    """In memory or staged from disk, further apart there."""
    torch.manual_seed(0)
    segments, blocks = packed(SPANS, 100), torch.randn(100, 2, 2, BLOCK_SIZE, 16)
    query, spec = torch.randn(4, int(segments.starts[-1]), 16), AttentionSpec(0.3)
    slots, room = torch.randperm(60), torch.empty(60, 3, 2, BLOCK_SIZE, 16)
    room[:, :2][slots] = blocks[40:]
    split = LayerBlocks(blocks[:40], room[:, :2])
    moved = replace(segments, block_table=torch.cat([torch.arange(40), 40 + slots]).int()[segments.block_table.long()])
    for kernel in both_attentions(Plain("float32"), cache):
        whole = kernel(query, LayerBlocks(blocks), segments, spec)
        assert torch.equal(kernel(query, split, moved, spec), whole)


@pytest.mark.parametrize("rows", [1, 2, 50])
@pytest.mark.parametrize("value_topk", [1.0, 0.5])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_nan_in_the_cache_is_not_hidden(cache, rows, value_topk, dtype):
    compiled, values = compiled_attention(Plain(dtype), cache, threads=2), getattr(torch, dtype)
    blocks = LayerBlocks(torch.full((10, 2, 1, BLOCK_SIZE, 8), torch.nan, dtype=values))
    query, spec = torch.ones(1, rows, 8, dtype=values), AttentionSpec(1.0, value_topk=value_topk)
    found = compiled(query, blocks, packed([(rows, 9)], 10), spec)
    assert found.isnan().all()


def test_no_compiler_is_said_and_survived(tmp_path, monkeypatch):
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(NoCompilerError, match="no-such-compiler"):
        compiled_attention(Plain("float32"), tmp_path, 1)


def test_a_compiler_may_have_arguments(tmp_path, monkeypatch):
    monkeypatch.setenv("CXX", "env g++")
    product = compiled_gemm(Plain("float32"), tmp_path, threads=1)
    out = torch.empty(1, 16)
    product(torch.ones(1, 8), torch.ones(16, 8), None, out)
    assert (out == 8).all()


@pytest.mark.parametrize(
    "path", ["/a/libgomp.so.1", "/my work/repo/torch.libs/libgomp-a34b.so.1.0.0", "/x y/libomp.so"]
)
def test_the_openmp_library_is_found_wherever_it_lies(path):
    lines = ["7f00-7f01 r--p 00000000 fe:00 17    /lib/libc.so.6", "7f01-7f02 rw-p 00000000 00:00 0",
             f"7f02-7f03 r-xp 00001000 fe:00 18                         {path}"]  # fmt: skip
    assert openmp("\n".join(lines)) == path
    assert openmp("\n".join(lines[:2])) == "-fopenmp"


def test_a_source_that_does_not_compile_leaves_nothing(tmp_path):
    source = tmp_path / "broken.cpp"
    source.write_text("this is not C++")
    with pytest.raises(NoCompilerError, match=r"broken.cpp"):
        load(source, tmp_path / "cache")
    assert not list((tmp_path / "cache" / "kernels").glob("broken-*/"))


@pytest.mark.parametrize("heads", [2, 8, 32])
@pytest.mark.parametrize("sinks", [False, True])
def test_attention_to_two_parts_is_put_together_as_attention_to_all(cache, heads, sinks):
    """As blocks in host memory and on a device are; one of the parts may hold nothing."""
    torch.manual_seed(0)
    blocks = LayerBlocks(torch.randn(40, 2, 2, BLOCK_SIZE, 24))
    query, spec = torch.randn(heads, 4, 24), AttentionSpec(0.3, sinks=torch.randn(heads) if sinks else None)
    own = torch.randperm(40).view(4, 10).int()
    whole = AttentionMetadata.of([1] * 4, [59, 72, 30, 11], own)
    even, odd = own[:, ::2].contiguous(), own[:, 1::2].contiguous()
    parts = AttentionMetadata.of([1] * 4, [31, 39, 15, 7], even), AttentionMetadata.of([1] * 4, [27, 32, 14, 3], odd)
    nothing = AttentionMetadata.of([1] * 4, [-1] * 4, even)
    for kernel in both_attentions(Plain("float32"), cache):
        lse = [torch.empty(4, heads) for _ in range(3)]
        expected = kernel(query, blocks, whole, spec, lse[0])
        first, second = (
            kernel(query, blocks, part, replace(spec, sinks=None if i else spec.sinks), lse[1 + i])
            for i, part in enumerate(parts)
        )
        merged = merge_attention_states(first, lse[1], second, lse[2])
        torch.testing.assert_close(merged, expected, rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(torch.logaddexp(lse[1], lse[2]), lse[0], rtol=1e-5, atol=1e-5)
    none = reference_attention(plain_quantizer(Plain("float32")))(query, blocks, nothing, AttentionSpec(0.3), lse[1])
    assert torch.equal(merge_attention_states(none, lse[1], expected, lse[0]), expected)


@given(data=st.data())
@pytest.mark.parametrize(("dtype", "stored"), [
    (torch.float32, torch.float32), (torch.bfloat16, torch.bfloat16), (torch.uint8, torch.uint8),
    (torch.float32, torch.bfloat16), (torch.float32, torch.float16), (torch.bfloat16, torch.float32),
])  # fmt: skip
def test_rows_are_written_where_torch_writes_them_and_as_it_rounds_them(cache, dtype, stored, data):
    heads, width, count = data.draw(st.integers(1, 3)), data.draw(st.integers(1, 70)), data.draw(st.integers(0, 40))
    seed = data.draw(st.integers(0, 2**31))
    generator = torch.Generator().manual_seed(seed)

    def random(*size):
        whole = torch.randint(0, 200, size, generator=generator)
        return whole if dtype == torch.uint8 else whole + torch.randn(size, generator=generator)

    blocks = random(9, 2, heads, BLOCK_SIZE, width).to(stored)
    slots = torch.randperm(9 * BLOCK_SIZE, generator=generator)[:count]
    tokens = None
    if data.draw(st.booleans()):
        tokens = torch.randperm(50, generator=generator)[:count]
    size = heads, count if tokens is None else 50, width
    keys, values = (random(*size).to(dtype).transpose(0, 1) for _ in range(2))  # as attention has them
    target = Target(tokens, slots // BLOCK_SIZE, slots % BLOCK_SIZE, staged=False)
    found, expected = blocks.clone(), blocks.clone()
    compiled_writer(cache)(found, target, keys, values)
    torch_writer(expected, target, keys, values)
    assert torch.equal(found, expected)
