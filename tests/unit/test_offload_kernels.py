"""The compiled kernels against float64, and what they promise beside."""

import itertools

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from engines.offload.gemm import by_torch
from engines.offload.kernels import (
    NoCompilerError,
    Segments,
    compiled_attention,
    compiled_product,
    reference_attention,
)
from engines.offload.kernels.build import load, openmp
from engines.offload.pages import PAGE_TOKENS, pages_for
from engines.offload.rule import Rule
from tests.offload import with_kernels

#: What a product is added to: one row for all such as a bias, the output itself.
STARTS = ("nothing", "row", "out")


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    return with_kernels(tmp_path_factory.mktemp("kernels"))


@pytest.fixture(scope="module", params=["torch", "kernel"])
def product(request, cache):
    return by_torch if request.param == "torch" else compiled_product(cache, threads=2)


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


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_the_kernel_multiplies_weights_as_they_are_stored(cache, dtype):
    torch.manual_seed(0)
    x, weight = torch.randn(50, 700), torch.randn(90, 700).to(dtype)
    out = torch.empty(50, 90)
    compiled_product(cache, threads=2)(x, weight, None, out)
    torch.testing.assert_close(out.double(), x.double() @ weight.double().T, rtol=1e-5, atol=1e-4)


@given(st.integers(1, 400), st.integers(1, 600), st.integers(1, 40), st.data())
def test_a_row_does_not_depend_on_those_that_share_its_product(cache, rows, columns, outputs, data):
    """Bit for bit: so a request's result does not depend on what else runs."""
    product = compiled_product(cache, threads=2)
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
    compiled_product(cache, threads=1)(torch.zeros(8, 30), weight, None, out)
    assert out.isnan()[:, 3].all()
    assert out.isnan().sum() == 8


# ------------------------------------------------------------------------------------------------ attention


@pytest.fixture(scope="module")
def compiled(cache):
    return compiled_attention(cache, threads=2)


def packed(spans, pages):
    """Segments of (rows, tokens before them), on random pages."""
    counts, cached = zip(*spans, strict=True)
    longest = max(pages_for(c + n) for n, c in spans)
    table = torch.randperm(pages)[: len(spans) * longest].view(len(spans), longest).int()
    starts = torch.tensor([0, *itertools.accumulate(counts)], dtype=torch.int32)
    return Segments(starts, torch.tensor(cached, dtype=torch.int32), table)


def by_hand(query, keys, values, segments, rule):
    """One row and head at a time, in float64."""
    heads, tokens, dim = query.shape
    group = heads // keys.shape[1]
    out = torch.empty(tokens, heads, dim, dtype=torch.float64)
    starts = segments.starts.tolist()
    for i, before in enumerate(segments.cached.tolist()):
        for row in range(starts[i], starts[i + 1]):
            position = before + row - starts[i]
            first = max(0, position - rule.window + 1) if rule.window else 0
            places = [(segments.table[i, t // PAGE_TOKENS], t % PAGE_TOKENS) for t in range(first, position + 1)]
            for head in range(heads):
                k, v = (torch.stack([c[p, head // group, t] for p, t in places]).double() for c in (keys, values))
                scores = k @ query[head, row].double() * rule.scale
                if rule.softcap:
                    scores = rule.softcap * (scores / rule.softcap).tanh()
                sink = rule.sinks[head].double().exp() if rule.sinks is not None else 0
                out[row, head] = scores.exp() / (scores.exp().sum() + sink) @ v
    return out


SPANS = [(1, 0), (1, 2), (1, 8), (1, 39), (70, 0), (7, 5), (49, 30), (2, 0)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(4, 4, 64), (8, 2, 32), (6, 1, 24), (1, 1, 7), (2, 1, 80)])
@pytest.mark.parametrize("more", [{}, {"window": 8}, {"softcap": 2.0}, {"window": 40, "softcap": 1.5, "sinks": True}])
def test_attention_kernels_agree_with_float64(compiled, dtype, heads, kv_heads, dim, more):
    torch.manual_seed(0)
    segments, pages = packed(SPANS, 100), 100
    keys, values = (torch.randn(pages, kv_heads, PAGE_TOKENS, dim).to(dtype) for _ in range(2))
    tokens = int(segments.starts[-1])
    query = torch.randn(tokens, heads, dim + 3)[..., :dim].transpose(0, 1)  # as a model gives it: a view
    rule = Rule(0.3, **more | {"sinks": torch.randn(heads) if more.get("sinks") else None})
    exact = by_hand(query, keys, values, segments, rule)
    for kernel in (compiled, reference_attention):
        found = kernel(query, keys, values, segments, rule)
        # scores reach 10 and carry a few roundings of 6e-8 each, which their exponentials carry on
        torch.testing.assert_close(found.double(), exact, rtol=1e-5, atol=5e-6)


@given(st.integers(4, 120), st.sampled_from([None, 5, 33]), st.data())
def test_a_prompt_may_be_cut_anywhere(compiled, length, window, data):
    """Bit for bit: so a request's result does not depend on what else runs."""
    cut = data.draw(st.integers(2, length - 2))
    torch.manual_seed(length)
    keys, values = (torch.randn(40, 2, PAGE_TOKENS, 48) for _ in range(2))
    query, rule = torch.randn(4, length, 48), Rule(0.2, window)
    whole = packed([(length, 0)], 40)
    together = compiled(query, keys, values, whole, rule)
    for rows, before in ((slice(0, cut), 0), (slice(cut, length), cut)):
        part = Segments(torch.tensor([0, rows.stop - rows.start]).int(), torch.tensor([before]).int(), whole.table)
        assert torch.equal(compiled(query[:, rows], keys, values, part, rule), together[rows])


@pytest.mark.parametrize("spread", [1.0, 30.0, 1000.0])
def test_softmax_of_scores_far_apart(compiled, spread):
    torch.manual_seed(0)
    segments = packed([(1, 60), (60, 0)], 40)
    keys, values = (torch.randn(40, 1, PAGE_TOKENS, 16) for _ in range(2))
    query, rule = torch.randn(1, 61, 16) * spread, Rule(1.0)
    exact = reference_attention(query.double(), keys.double(), values.double(), segments, rule)
    found = compiled(query, keys, values, segments, rule)
    torch.testing.assert_close(found.double(), exact, rtol=1e-4, atol=1e-5 * spread)


def test_half_precision_is_widened_exactly(compiled):
    """Every finite float16 as a value with weight one: subnormal numbers and both zeros included."""
    bits = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(torch.float16)
    finite = bits[bits.isfinite()].view(-1, 1, 1, 1).expand(-1, 1, PAGE_TOKENS, 1).contiguous()
    count = len(finite)
    table = torch.arange(count, dtype=torch.int32).view(-1, 1)
    alone = Segments(torch.arange(count + 1).int(), torch.zeros(count, dtype=torch.int32), table)
    found = compiled(torch.zeros(1, count, 1), torch.zeros_like(finite), finite, alone, Rule(1.0))
    assert torch.equal(found.view(-1), finite[:, 0, 0, 0].float())


@pytest.mark.parametrize("rows", [1, 2, 50])
def test_nan_in_the_cache_is_not_hidden(compiled, rows):
    keys = torch.full((10, 1, PAGE_TOKENS, 8), torch.nan)
    found = compiled(torch.ones(1, rows, 8), keys, keys, packed([(rows, 0)], 10), Rule(1.0))
    assert found.isnan().all()


def test_no_compiler_is_said_and_survived(tmp_path, monkeypatch):
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(NoCompilerError, match="no-such-compiler"):
        compiled_attention(tmp_path, 1)


def test_a_compiler_may_have_arguments(tmp_path, monkeypatch):
    monkeypatch.setenv("CXX", "env g++")
    product = compiled_product(tmp_path, threads=1)
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
