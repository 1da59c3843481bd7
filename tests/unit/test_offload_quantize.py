"""Group-wise quantization against its definition in float64, the rotation before it, and the compiled ways of both."""

import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from hypothesis.extra.numpy import array_shapes, arrays

from engines.offload.kernels import quantize
from engines.offload.kernels.hadamard import compiled_hadamard, device_hadamard, hadamard
from engines.offload.kernels.quantizer import compiled_quantizer, numba_quantizer
from engines.offload.memory.storage import BITS, GROUPS, Grouped
from harness.api import UnsupportedError
from tests.offload import hadamard_matrix

HOWS = [Grouped(bits, group) for bits in BITS for group in GROUPS]


def rows(elements=None, sides=300):
    """Float32 matrices with anything in them that float32 has."""
    elements = st.floats(width=32) if elements is None else elements
    return arrays(np.float32, array_shapes(min_dims=2, max_dims=2, max_side=sides), elements=elements)


def in_half(x):
    """How far float16's nearest may be: half a unit in the last place, of subnormal numbers 2^-24."""
    return max(2**-11 * abs(x), 2**-25)


def groups_of(x, how):
    """[(row, columns)] of each group."""
    return [
        (i, slice(j, min(j + how.group, x.shape[1]))) for i in range(len(x)) for j in range(0, x.shape[1], how.group)
    ]


@given(rows(st.floats(-1e4, 1e4, width=32)), st.sampled_from(HOWS))
@example(np.full((1, 70), 3.0, np.float32), Grouped(4, 64))
@example(np.array([[65504.0, -65504.0, 0.0]], np.float32), Grouped(3, 32))
@example(np.array([[1e-8, 2e-8, 0.0]], np.float32), Grouped(8, 32))
def test_values_come_back_as_near_as_the_step_allows(x, how):
    found = quantize.unpack(quantize.pack(torch.from_numpy(x), how), x.shape[1], how).numpy()
    for i, columns in groups_of(x, how):
        exact = x[i, columns].astype(np.float64)
        levels = (1 << how.bits) - 1
        step = (exact.max() - exact.min()) / levels
        # half a step, and what float16 moves the step, which is taken up to `levels` times, and the least value by
        slack = step / 2 + levels * in_half(step) + in_half(exact.min())
        assert np.abs(found[i, columns] - exact).max() <= slack * (1 + 1e-6) + 1e-6 * np.abs(exact).max()


@given(rows(st.floats(-1e4, 1e4, width=32), sides=140), st.sampled_from(HOWS))
def test_codes_are_the_nearest_in_float64(x, how):
    packed = quantize.pack(torch.from_numpy(x), how)
    scale, minimum = (part.numpy().astype(np.float64) for part in quantize.scales_and_minima(torch.from_numpy(x), how))
    found = quantize.unpack(packed, x.shape[1], how).numpy()
    for i, columns in groups_of(x, how):
        s, least = scale[i, columns.start // how.group], minimum[i, columns.start // how.group]
        codes = np.rint((x[i, columns] - least) / s).clip(0, (1 << how.bits) - 1) if s else 0.0
        np.testing.assert_allclose(found[i, columns], least + codes * s, rtol=1e-6, atol=1e-6 * max(abs(least), s))


@pytest.mark.parametrize("way", ["compiled", "numba"])
@given(x=rows(), how=st.sampled_from(HOWS))
@example(x=np.array([[0.0, -0.0, 0.0], [-0.0, -0.0, 0.0]], np.float32), how=Grouped(4, 32))
@example(x=np.array([[-1e-9, 1e-7, 1e-40]], np.float32), how=Grouped(4, 32))
@example(x=np.array([[3e38, -3e38, 1.0]], np.float32), how=Grouped(8, 32))
def test_every_way_gives_the_same_bits(cache, way, x, how):
    if way == "numba":
        pytest.importorskip("numba")
    quantizer = numba_quantizer(how, threads=2) if way == "numba" else compiled_quantizer(how, cache, threads=2)
    packed = quantize.pack(torch.from_numpy(x), how)
    assert torch.equal(quantizer.pack(torch.from_numpy(x)), packed)
    out = torch.empty(x.shape)
    quantizer.unpack(packed, out)
    torch.testing.assert_close(out, quantize.unpack(packed, x.shape[1], how), rtol=1e-6, atol=1e-6, equal_nan=True)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("how", HOWS)
def test_nan_and_infinity_spoil_their_group_only(how, bad):
    x = torch.randn(2, 3 * how.group)
    x[1, how.group + 5] = bad
    found = quantize.unpack(quantize.pack(x, how), x.shape[1], how)
    spoilt = torch.zeros_like(x, dtype=torch.bool)
    spoilt[1, how.group : 2 * how.group] = True
    assert torch.equal(found.isnan(), spoilt)


@pytest.mark.parametrize("how", HOWS)
def test_a_group_of_one_value_is_that_value(how):
    x = torch.full((1, how.group + 3), 0.5)
    assert torch.equal(quantize.unpack(quantize.pack(x, how), x.shape[1], how), x)


def test_four_bits_in_groups_of_64_are_four_and_a_half():
    assert Grouped(4, 64).row_bytes(2048) * 8 / 2048 == 4.5
    assert Grouped(4, 64).row_bytes(70) == 36 + 2 * 4  # codes of 72 values; a second group for six of them
    assert quantize.pack(torch.zeros(5, 70), Grouped(4, 64)).shape == (5, 44)


@pytest.mark.parametrize(("bits", "group"), [(5, 64), (4, 48), (16, 64)])
def test_there_are_no_other_bits_and_groups(bits, group):
    with pytest.raises(UnsupportedError, match="bits"):
        Grouped(bits, group)


@pytest.mark.parametrize(("columns", "size"), [(1, 1), (7, 1), (24, 8), (64, 64), (80, 16), (128, 128)])
def test_a_rotation_is_a_hadamard_matrix_in_parts(columns, size):
    x = torch.randn(3, 5, columns)
    matrix = torch.block_diag(*[hadamard_matrix(size)] * (columns // size))
    torch.testing.assert_close(hadamard(x).double(), x.double() @ matrix.double(), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(hadamard(hadamard(x)), x, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(device_hadamard()(x.half()), hadamard(x.half()), rtol=1e-5, atol=1e-5)


def test_a_rotated_row_does_not_depend_on_the_others():
    x = torch.randn(50, 64).bfloat16()
    assert torch.equal(hadamard(x)[17], hadamard(x[17]))


@pytest.mark.parametrize("columns", [1, 2, 7, 24, 64, 80, 128])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_compiled_rotation_is_the_same_to_the_bit(cache, columns, dtype):
    x = torch.randn(3, 5, columns).to(dtype).transpose(0, 1)
    before = x.clone()
    assert torch.equal(compiled_hadamard(cache, 2)(x), hadamard(x))
    assert torch.equal(x, before)


def test_one_large_column_no_longer_decides_the_step():
    x = torch.randn(100, 64)
    x[:, 3] += 40
    assert (hadamard(x).amax(1) - hadamard(x).amin(1)).max() < 0.6 * (x.amax(1) - x.amin(1)).min()
