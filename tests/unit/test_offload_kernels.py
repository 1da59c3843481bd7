"""The compiled kernels against float64, and what they promise beside."""

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from engines.offload.gemm import by_torch
from engines.offload.kernels import NoCompilerError, compiled_decode, compiled_product, reference_decode
from engines.offload.kernels.build import load
from engines.offload.pages import PAGE_TOKENS
from engines.offload.rule import Rule

#: What a product is added to: one row for all such as a bias, the output itself.
STARTS = ("nothing", "row", "out")


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    return tmp_path_factory.mktemp("kernels")


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


@pytest.fixture(scope="module")
def compiled(cache):
    return compiled_decode(cache, threads=2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(4, 4, 64), (8, 2, 32), (6, 1, 24), (1, 1, 7)])
@pytest.mark.parametrize("more", [{}, {"window": 8}, {"softcap": 2.0}, {"window": 9, "softcap": 1.5, "sinks": True}])
def test_decode_kernels_agree_with_float64(compiled, dtype, heads, kv_heads, dim, more):
    torch.manual_seed(0)
    lengths = torch.tensor([1, 3, 8, 9, 40], dtype=torch.int32)
    pages = 30
    keys, values = (torch.randn(pages, kv_heads, PAGE_TOKENS, dim).to(dtype) for _ in range(2))
    table = torch.randperm(pages)[:25].view(5, 5).int()
    query = torch.randn(5, heads, dim)
    sinks = torch.randn(heads) if more.get("sinks") else None
    rule = Rule(0.3, **more | {"sinks": sinks})
    exact = torch.empty(5, heads, dim, dtype=torch.float64)
    for i, n in enumerate(lengths.tolist()):
        first = max(0, n - more.get("window", n))
        k, v = (
            torch.stack([c[table[i, t // PAGE_TOKENS], :, t % PAGE_TOKENS] for t in range(first, n)], 1).double()
            for c in (keys, values)
        )
        scores = query[i].double().view(kv_heads, -1, dim) @ k.mT * 0.3
        if cap := more.get("softcap"):
            scores = cap * (scores / cap).tanh()
        weights = scores.exp()
        total = weights.sum(-1) + (0 if sinks is None else sinks.double().exp().view(kv_heads, -1))
        exact[i] = (weights / total[..., None] @ v).reshape(heads, dim)
    for kernel in (compiled, reference_decode):
        torch.testing.assert_close(
            kernel(query, keys, values, table, lengths, rule).double(), exact, rtol=1e-5, atol=1e-6
        )


def test_half_precision_is_widened_exactly(compiled):
    """Every finite float16 as a value with weight one: subnormal numbers and both zeros included."""
    bits = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(torch.float16)
    finite = bits[bits.isfinite()].view(-1, 1, 1, 1).expand(-1, 1, PAGE_TOKENS, 1).contiguous()
    count = len(finite)
    table = torch.arange(count, dtype=torch.int32).view(-1, 1)
    ones = torch.ones(count, dtype=torch.int32)
    found = compiled(torch.zeros(count, 1, 1), torch.zeros_like(finite), finite, table, ones, Rule(1.0))
    assert torch.equal(found.view(-1), finite[:, 0, 0, 0].float())


def test_nan_in_the_cache_is_not_hidden(compiled):
    keys = torch.full((1, 1, PAGE_TOKENS, 8), torch.nan)
    one = torch.ones(1, 1, dtype=torch.int32)
    found = compiled(torch.ones(1, 1, 8), keys, keys, one * 0, one[0], Rule(1.0))
    assert found.isnan().all()


def test_no_compiler_is_said_and_survived(tmp_path, monkeypatch):
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(NoCompilerError, match="no-such-compiler"):
        compiled_decode(tmp_path, 1)


def test_a_source_that_does_not_compile_leaves_nothing(tmp_path):
    source = tmp_path / "broken.cpp"
    source.write_text("this is not C++")
    with pytest.raises(NoCompilerError, match=r"broken.cpp"):
        load(source, tmp_path / "cache")
    assert not list((tmp_path / "cache" / "kernels").glob("broken-*/"))
