"""Weights quantized by least squares: never worse than rounding to nearest, and exact where nearest is."""

import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from hypothesis.extra.numpy import array_shapes, arrays

from engines.offload.kernels import least_squares, quantize
from engines.offload.kernels.quantizer import compiled_weight_packer, numba_weight_packer
from engines.offload.memory.storage import BITS, GROUPS, Grouped

HOWS = [Grouped(bits, group) for bits in BITS for group in GROUPS]
WAYS = ["compiled", "numba", "reference"]


def packer(way, how, cache, threads=2):
    if way == "compiled":
        return compiled_weight_packer(how, cache, threads)
    if way == "numba":
        pytest.importorskip("numba")
        return numba_weight_packer(how, threads)
    return lambda x: least_squares.pack(x, how)


def errors(x, packed, how):
    """Each group's squared error, float64 [rows, groups]."""
    off = (quantize.unpack(packed, x.shape[1], how).double() - x.double()) ** 2
    return torch.nn.functional.pad(off, (0, -x.shape[1] % how.group)).reshape(len(x), -1, how.group).sum(-1)


@pytest.mark.parametrize("way", WAYS)
@given(
    x=arrays(np.float32, array_shapes(min_dims=2, max_dims=2, max_side=140), elements=st.floats(-1e4, 1e4, width=32)),
    how=st.sampled_from(HOWS),
)
@example(x=np.array([[1e-8, 2e-8, 0.0]], np.float32), how=Grouped(8, 32))
@example(x=np.array([[65504.0, -65504.0, 0.0, 1.0]], np.float32), how=Grouped(3, 32))
@example(x=np.array([[0.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 0.5]], np.float32), how=Grouped(3, 32))
def test_no_group_is_worse_than_rounded_to_nearest(cache, way, x, how):
    values = torch.from_numpy(x)
    ours, nearest = (
        errors(values, packed, how) for packed in (packer(way, how, cache)(values), quantize.pack(values, how))
    )
    # the kernel compares errors that it sums in float32, of values less their mean
    rounding = 1e-6 * nearest + how.group * (2**-23 * values.double().abs().max()) ** 2
    assert (ours <= nearest + rounding).all()


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("how", HOWS, ids=str)
@given(data=st.data())
def test_values_on_a_grid_come_back_as_they_were(cache, way, how, data):
    """A file that is quantized in such groups loses nothing, if each group uses its least and its largest code."""
    columns = data.draw(st.integers(1, 2)) * how.group + data.draw(st.integers(2, how.group))
    seed = data.draw(st.integers(0, 2**31))
    generator = torch.Generator().manual_seed(seed)
    codes = torch.randint(0, 1 << how.bits, (3, columns), generator=generator)
    codes[:, :: how.group], codes[:, 1 :: how.group] = 0, (1 << how.bits) - 1
    groups = how.groups(columns)
    scale, minimum = torch.rand(3, groups, generator=generator) + 0.01, torch.randn(3, groups, generator=generator)
    scale, minimum = (
        part.half().float().repeat_interleave(how.group, 1)[:, :columns] for part in (scale * 0.1, minimum)
    )
    x = minimum + codes * scale
    back = quantize.unpack(packer(way, how, cache)(x), columns, how)
    torch.testing.assert_close(back, x, rtol=2**-22, atol=2**-22)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(("bits", "most"), [(3, 0.85), (4, 0.87), (8, 0.95)])
def test_random_values_lose_much_less(cache, way, bits, most):
    how, x = Grouped(bits, 64), torch.randn(64, 640, generator=torch.Generator().manual_seed(1))
    ours = errors(x, packer(way, how, cache)(x), how).sum()
    assert ours < most * errors(x, quantize.pack(x, how), how).sum()
    assert ours.item() == pytest.approx(errors(x, least_squares.pack(x, how), how).sum().item(), rel=0.01)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_nan_and_infinity_spoil_their_group_only(cache, way, bad):
    how, x = Grouped(4, 32), torch.randn(2, 100)
    x[1, 40] = bad
    found = quantize.unpack(packer(way, how, cache)(x), 100, how)
    spoilt = torch.zeros_like(x, dtype=torch.bool)
    spoilt[1, 32:64] = True
    assert torch.equal(found.isnan(), spoilt)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("value", [0.0, -0.0, 0.5, -3.0])
@pytest.mark.parametrize("how", HOWS, ids=str)
def test_a_group_of_one_value_is_that_value(cache, way, how, value):
    x = torch.full((2, how.group + 3), value)
    assert torch.equal(packer(way, how, cache)(x), quantize.pack(x, how))


@pytest.mark.parametrize("how", HOWS, ids=str)
def test_the_number_of_threads_changes_no_byte(cache, how):
    x = torch.randn(37, 200)
    assert torch.equal(packer("compiled", how, cache, threads=1)(x), packer("compiled", how, cache, threads=3)(x))


def test_values_of_any_size_are_packed(cache):
    how = Grouped(4, 64)
    for size in (1e-42, 1e-30, 1e-8, 1e8, 1e30, 3e38):
        x = torch.linspace(-1, 1, 64)[None] * size
        compiled = packer("compiled", how, cache)(x)
        assert quantize.unpack(compiled, 64, how).isfinite().all()
        assert torch.equal(compiled, quantize.pack(x, how)) or errors(x, compiled, how) < errors(
            x, quantize.pack(x, how), how
        )
